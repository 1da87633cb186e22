"""Streams that defenses draw from: the cipher, what is made of its bytes, and that no two of them are alike."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import io
import math
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from attacks_on_noise import impossible
from gradveil.core import streams
from gradveil.core.errors import GradveilError
from gradveil.core.streams import GRID, Stream

SINGLE, DOUBLE = torch.empty(0), torch.empty(0, dtype=torch.float64)


def test_the_bytes_are_those_of_rfc_8439() -> None:
    """Appendix A.1, test vector 1: a key, a nonce and a counter of zero."""
    block = Stream(bytes(32)).words(8).numpy().tobytes().hex()
    assert block.startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert block.endswith("6a43b8f41518a11cc387b669b2ee6586")


def test_each_draw_has_a_nonce_of_its_own() -> None:
    """Appendix A.1, test vector 5 has a 2 in the last byte of its nonce."""
    stream = Stream(bytes(32))
    assert len({stream.words(8).numpy().tobytes() for _ in range(3)}) == 3
    assert (
        Stream(bytes(32), 2 << 88)
        .words(8)
        .numpy()
        .tobytes()
        .hex()
        .startswith("c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab")
    )


def test_a_seed_and_a_path_name_a_stream() -> None:
    paths: list[tuple[Any, ...]] = [
        (0,),
        (1,),
        (0, "a"),
        (0, "b"),
        (0, "a", 1),
        (0, "a1"),
        (0, "a", "1", "2"),
        (0, "a", "12"),
    ]
    first = {path: Stream.seeded(*path).words(1).item() for path in paths}
    assert len(set(first.values())) == len(paths)
    assert first == {path: Stream.seeded(*path).words(1).item() for path in paths}


@pytest.mark.parametrize(
    ("draw", "law"),
    [
        (Stream.normal, stats.norm()),
        (Stream.laplace, stats.laplace(scale=0.5**0.5)),
        (Stream.exponential, stats.expon()),
        (Stream.uniform, stats.uniform()),
    ],
)
def test_draws_follow_their_law(draw: Callable[..., Tensor], law: Any) -> None:
    drawn = draw(Stream.seeded(11), (200_001,), torch.empty(0, dtype=torch.float64))
    assert stats.kstest(drawn.numpy(), law.cdf).pvalue > 1e-3
    for apart in (1, 2**14, 100_000):  # neighbours, the two of a pair, far away
        pairs = torch.stack([drawn[:-apart], drawn[apart:]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / (len(drawn) - apart) ** 0.5


def test_tails_are_there() -> None:
    """Of the smallest word comes the longest vector: 9.4 deviations. Of the largest comes 0, and never infinity."""
    smallest, largest = torch.tensor([0]), torch.tensor([2**63 - 1])
    assert float((-2 * streams._open_uniform(smallest).log()).sqrt()) == pytest.approx(9.42, abs=0.01)
    assert float(streams._open_uniform(largest).log()) == 0


def test_whole_numbers_and_orders() -> None:
    stream = Stream.seeded(5)
    counts = torch.bincount(stream.integers(7, (70_000,)), minlength=7)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    assert sorted(stream.permutation(50).tolist()) == list(range(50))
    firsts = torch.stack([stream.permutation(5) for _ in range(5000)])[:, 0]
    assert stats.chisquare(torch.bincount(firsts).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_noised_values_lie_on_a_grid_that_the_noise_alone_decides(dtype: torch.dtype, kind: streams.Kind) -> None:
    tree = {"a": torch.full((3, 5), 1 / 3, dtype=dtype), "b": torch.zeros((), dtype=dtype), "c": torch.zeros(0)}
    sent = Stream.seeded(1).noised(tree, 0.3, kind)
    assert {name: (t.shape, t.dtype) for name, t in sent.items()} == {n: (t.shape, t.dtype) for n, t in tree.items()}
    places = sent["a"].double() / 2.0**-18
    assert 0.3 * GRID / 2 < 2.0**-18 <= 0.3 * GRID
    assert dtype in (torch.float16, torch.bfloat16) or torch.equal(places, places.round())
    assert torch.equal(tree["b"], torch.zeros((), dtype=dtype)), "no argument is edited"


def test_noise_has_its_deviation_and_nothing_is_added_without_one() -> None:
    zero = {"w": torch.zeros(100_000)}
    for kind in ("gaussian", "laplace"):
        assert float(Stream.seeded(2).noised(zero, 0.25, kind)["w"].std()) == pytest.approx(0.25, rel=0.02)
    still = Stream.secret().noised(zero, 0.0)["w"]
    assert torch.equal(still, zero["w"])
    assert still is not zero["w"]


def test_where_noised_values_can_be_does_not_tell_the_value() -> None:
    """Mironov's attack: which of two values can have given this output? Plain floating-point sums tell."""

    def plain(x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).double()

    def ours(x: Tensor) -> Tensor:
        return Stream.seeded(7).noised({"x": x}, 1.0)["x"]

    def shared(noised: Callable[[Tensor], Tensor]) -> int:
        """Outputs that both values give."""
        zero, third = (set(noised(torch.full((400_000,), x, dtype=torch.float64)).tolist()) for x in (0.0, 1 / 3))
        return len(zero & third)

    assert shared(plain) == 0, "every output names its value"
    assert shared(ours) > 100_000


def _drawn_in_fork(stream: Stream, queue: Any) -> None:
    queue.put(stream.words(8).numpy().tobytes())


def test_forked_processes_do_not_share_a_stream() -> None:
    stream, context = Stream.secret(), multiprocessing.get_context("fork")
    queue = context.Queue()
    stream.words(8)
    children = [context.Process(target=_drawn_in_fork, args=(stream, queue)) for _ in range(4)]
    for child in children:
        child.start()
    drawn = {queue.get(timeout=60) for _ in children} | {stream.words(8).numpy().tobytes()}
    for child in children:
        child.join(60)
    assert len(drawn) == 5


def test_threads_that_share_a_stream_never_get_the_same_numbers() -> None:
    stream = Stream.secret()
    with ThreadPoolExecutor(16) as pool:
        drawn = list(pool.map(lambda _: stream.words(4).numpy().tobytes(), range(2000)))
    assert len(set(drawn)) == 2000
    assert stream.draws == 2000


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_of_a_secret_stream_is_another_one(copied: Callable[[Stream], Stream]) -> None:
    stream = Stream.secret()
    assert not torch.equal(copied(stream).words(4), stream.words(4))
    seeded = Stream.seeded(1)
    seeded.words(3)
    assert torch.equal(copied(seeded).words(4), seeded.words(4))


def test_secret_streams_take_their_key_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(size: int) -> bytes:
        asked.append(size)
        return os.urandom(size)

    monkeypatch.setattr("gradveil.core.streams.secrets.token_bytes", counted)
    assert not Stream.secret().repeatable
    assert Stream.seeded(1).repeatable
    assert asked == []
    stream = Stream.secret()
    assert not torch.equal(stream.words(2), stream.words(2))
    assert asked == [32, 32], "one key for each draw"
    assert hashlib.sha256(b'["gradveil stream", 1]').digest() == Stream.seeded(1)._key


def test_a_draw_of_many_chunks_is_one_key_stream() -> None:
    """It does not start again after a chunk, and its length does not change its beginning."""
    short, long = (Stream.seeded(3, "long").words(count) for count in (1000, 2**18 + 5))
    assert torch.equal(short, long[:1000])
    assert len(long.unique()) == len(long)


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["by Python", "behind Python's back"])
def test_forks_and_their_forks_draw_from_keys_of_their_own(fork: Callable[[], int]) -> None:
    stream = Stream.secret()
    stream.words(1)
    reader, writer = os.pipe()

    def forked(then: Callable[[], None]) -> None:
        child = fork()
        if child == 0:
            try:
                then()
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    def report() -> None:
        os.write(writer, stream.words(2).numpy().tobytes())

    def report_and_fork() -> None:
        report()
        forked(report)

    forked(report_and_fork)
    forked(report)
    report()
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        words = np.frombuffer(pipe.read(), np.int64)
    assert len(words) == 8
    assert len(np.unique(words)) == 8


def test_a_stream_saved_by_torch_is_another_one() -> None:
    stream, held = Stream.secret(), io.BytesIO()
    torch.save(stream, held)
    held.seek(0)
    assert not torch.equal(torch.load(held, weights_only=False).words(4), stream.words(4))


def test_seeded_streams_are_the_same_in_every_run_and_on_every_machine() -> None:
    assert Stream.seeded(0, "a", 1).words(2).tolist() == [8790199400505802429, 7828473510996570367]


@pytest.mark.parametrize(
    ("draw", "distribution", "moment"),
    [
        (Stream.normal, stats.norm(), lambda k: math.prod(range(k - 1, 0, -2)) * (k % 2 == 0)),
        (Stream.laplace, stats.laplace(scale=0.5**0.5), lambda k: 0.5 ** (k / 2) * math.factorial(k) * (k % 2 == 0)),
        (Stream.uniform, stats.uniform(), lambda k: 1 / (k + 1)),
        (Stream.exponential, stats.expon(), math.factorial),
    ],
    ids=["normal", "laplace", "uniform", "exponential"],
)
def test_draws_have_their_distribution_and_nothing_in_common(draw: Any, distribution: Any, moment: Any) -> None:
    stream, size = Stream.seeded(0, "quality"), 500_001
    first, second = (draw(stream, (size,), DOUBLE).numpy() for _ in range(2))
    assert stats.kstest(first, distribution.cdf).pvalue > 1e-3
    for order in range(1, 5):
        spread = (moment(2 * order) - moment(order) ** 2) ** 0.5
        assert abs((first**order).mean() - moment(order)) < 5 * spread / size**0.5
    # neighbours, the two of a pair of Box and Muller, entries of one place in two parts, entries of two draws
    for lag in (1, 2, 8, 2**14, 2**15):
        for x, y in ((first[lag:], first[:-lag]), (first[lag:] ** 2, first[:-lag] ** 2)):
            assert abs(np.corrcoef(x, y)[0, 1]) < 5 / size**0.5, lag
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / size**0.5
    assert abs(np.corrcoef(first**2, second**2)[0, 1]) < 5 / size**0.5


def test_tails_have_the_weight_that_they_should() -> None:
    drawn = Stream.seeded(0, "tails").normal((4_000_000,), DOUBLE).abs()
    for bound in (3.0, 4.0, 4.5):
        expected = len(drawn) * 2 * stats.norm.sf(bound)
        assert abs(int((drawn > bound).sum()) - expected) < 5 * expected**0.5


class Extreme(Stream):
    """A stream whose words are all the same."""

    def __init__(self, word: int) -> None:
        super().__init__()
        self.word = word

    def words(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.full((count,), self.word, device=device)


@pytest.mark.parametrize("word", [0, 1, -1, 2**63 - 1, -(2**63), 2**62, 2**53 - 1])
@pytest.mark.parametrize("like", [SINGLE, DOUBLE, SINGLE.bfloat16()], ids=["float32", "float64", "bfloat16"])
def test_no_word_gives_a_number_that_is_not_finite(word: int, like: Tensor) -> None:
    stream = Extreme(word)
    for draw in (stream.normal, stream.laplace, stream.exponential):
        assert draw((5,), like).isfinite().all()
    assert stream.noised({"w": torch.zeros_like(like).new_zeros(5)}, 0.1)["w"].isfinite().all()


def test_each_bit_of_a_word_counts() -> None:
    """Also the last one, where it matters: in the tail, which reaches beyond nine deviations."""
    assert 9 < Extreme(1).normal((2,), DOUBLE).max() < Extreme(0).normal((2,), DOUBLE).max()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 3), (2**15 - 1,), (2**15 + 1,), (3, 2**15)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_shape_and_type_can_be_drawn(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stream, like = Stream.seeded(0, "shapes"), torch.empty(0, dtype=dtype)
    for draw in (stream.normal, stream.laplace, stream.exponential):
        drawn = draw(shape, like)
        assert (drawn.shape, drawn.dtype) == (torch.Size(shape), dtype)
        assert drawn.isfinite().all()
    tree = {"w": torch.ones(shape, dtype=dtype), "b": torch.ones(3)}
    sent = stream.noised(tree, 0.1)
    assert {n: (t.shape, t.dtype) for n, t in sent.items()} == {n: (t.shape, t.dtype) for n, t in tree.items()}
    assert all((t == 1).all() for t in tree.values())


def test_orders_and_signs_are_even() -> None:
    stream = Stream.seeded(0, "even")
    orders = torch.stack([stream.permutation(4) for _ in range(2400)])
    counts = (orders @ torch.tensor([64, 16, 4, 1])).unique(return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3
    signs = stream.signs((1_000_003,), DOUBLE)
    assert set(signs.tolist()) == {-1.0, 1.0}
    for lag in (0, 1, 8, 63, 64):
        products = signs if lag == 0 else signs[lag:] * signs[:-lag]
        assert abs(float(products.mean())) < 5 / len(products) ** 0.5


def verdicts_apart(noised: Callable[[float], Tensor]) -> float:
    """How much more often 1/3 is ruled out when it is not the truth, in the range of values where this is most so.

    Within a narrow range of values both truths are about as likely, so that only last places can tell them apart.
    """
    values = {true: noised(true).numpy() for true in (0.0, 1 / 3)}
    shares = []
    for low in np.arange(-1, 1, 1 / 8):
        inside = {true: x[(x >= low) & (x < low + 1 / 8)] for true, x in values.items()}
        shares.append({true: impossible(x, 1 / 3).mean() for true, x in inside.items()})
    return max(abs(share[0.0] - share[1 / 3]) for share in shares)


@pytest.mark.parametrize("like", [SINGLE, DOUBLE], ids=["float32", "float64"])
def test_last_places_tell_the_truth_under_plain_noise_and_not_under_ours(like: Tensor) -> None:
    rng, stream = torch.Generator().manual_seed(0), Stream.seeded(0, "last places")
    count = 200_000

    def plain(true: float) -> Tensor:
        first, second = (torch.rand(count, generator=rng, dtype=like.dtype) for _ in range(2))
        return true + (-2 * (1 - first).log()).sqrt() * (2 * math.pi * second).cos()

    def ours(true: float) -> Tensor:
        return stream.noised({"x": torch.full((count,), true, dtype=like.dtype)}, 1.0)["x"]

    assert verdicts_apart(plain) > 0.8
    assert verdicts_apart(ours) < 5 / (count / 50) ** 0.5


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("deviation", [0.1, 1.0, 3.3])
def test_what_is_sent_lies_on_one_grid_and_its_last_places_are_even(deviation: float, kind: Any) -> None:
    stream, step = Stream.seeded(0, "grid"), 2.0 ** math.floor(math.log2(deviation * GRID))
    counts = []
    for true in (0.0, 1 / 3):
        sent = stream.noised({"x": torch.full((200_000,), true)}, deviation, kind)["x"].double() / step
        assert torch.equal(sent, sent.round())
        counts.append((sent.long() & 63).bincount(minlength=64).numpy())
        assert stats.chisquare(counts[-1]).pvalue > 1e-3
    assert stats.chi2_contingency(np.stack(counts)).pvalue > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("count", [1, 8, 1001, 2**20 + 5])
def test_a_gpu_draws_the_same_bytes(count: int) -> None:
    there, here = Stream.seeded(9, "gpu"), Stream.seeded(9, "gpu")
    for _ in range(2):
        assert torch.equal(there.words(count, "cuda").cpu(), here.words(count))
    tree = {"a": torch.ones(count), "b": torch.zeros(3, 2)}
    on_gpu = Stream.seeded(4).noised({name: tensor.cuda() for name, tensor in tree.items()}, 0.1)
    for name, tensor in Stream.seeded(4).noised(tree, 0.1).items():
        torch.testing.assert_close(on_gpu[name].cpu(), tensor, rtol=0, atol=2e-6)


def test_draws_inside_of_a_transform_are_refused() -> None:
    """Every lane would get the same noise."""
    stream = Stream.secret()
    with pytest.raises(GradveilError, match="lane"):
        torch.func.vmap(lambda x: x + stream.normal((4,), x))(torch.zeros(3, 4))


def test_a_child_that_is_forked_while_threads_draw_does_not_hang() -> None:
    stream, stop = Stream.secret(), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            stream.words(1)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                stream.words(1)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_numbers_stay_below_1(dtype: torch.dtype) -> None:
    drawn = Stream.seeded(3).uniform((100_000,), torch.empty(0, dtype=dtype))
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    assert float(drawn.double().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("deviation", [1e-320, 1e-304, 1e-30, 1e30])
def test_noise_of_any_size_is_finite(deviation: float) -> None:
    assert Stream.seeded(0).noised({"a": torch.ones(5)}, deviation)["a"].isfinite().all()


def test_what_cannot_be_drawn_is_said() -> None:
    stream = Stream.seeded(0)
    assert stream.signs((0,), torch.empty(0)).shape == (0,)
    for below in (0, 2**63):
        with pytest.raises(GradveilError, match="below"):
            stream.integers(below, (1,))
    with pytest.raises(GradveilError, match="2\\*\\*35"):
        stream.words(2**35)
    assert not torch.equal(Stream.seeded(0, "a\x1fb").words(1), Stream.seeded(0, "a", "b").words(1))
