"""`learned` trains on what a defense makes of public examples, and never on what may be private."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from exchanges import observed_through
from gradveil import assets
from gradveil.attacks import Learned, learned
from gradveil.attacks.parts import decoder
from gradveil.attacks.parts import pairs as parts
from gradveil.attacks.parts.cost import CostMeter
from gradveil.attacks.parts.pairs import DefendedClients
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.data import MemoryImages, load
from gradveil.data import public as public_data
from gradveil.data.public import PublicImages
from gradveil.defenses import DEFENSES, Defense
from gradveil.metrics import luck, picks
from gradveil.threat import Knowledge, Observation
from naive import LowDecimals, PublicMixing, Quantised, Sign, TopWithFeedback

SAMPLES = load("mnist-samples")
PAIRS = 1000


def blurred(count: int) -> MemoryImages:
    """Public pictures that need no download: a few blots each, labelled by where they are."""
    rng = torch.Generator().manual_seed(0)
    coarse = (torch.rand(count, 1, 3, 3, generator=rng) - 0.2).clamp(min=0)
    images = torch.nn.functional.interpolate(coarse, size=(28, 28), mode="bilinear").mul(255).round().byte()
    labels = (images.flatten(1).float().sum(1) % 10).long()
    return replace(SAMPLES, name="blots", images=images, labels=labels)  # type: ignore[call-arg,return-value]


PUBLIC = blurred(2100)
PRIVATE = blurred(2140).subset(range(2100, 2140))
STRANGERS = blurred(2180).subset(range(2140, 2180))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decoder, "STEPS", 1)  # where a test is not about how well it learns
    learned._memory.clear()
    yield
    learned._memory.clear()


def seen(defense: Defense, *, images: int = 40, **options: Any) -> list[Observation]:
    return observed_through(defense, PRIVATE, PUBLIC, images=images, **options)


def recognised(observations: list[Observation], pairs: int = PAIRS) -> tuple[float, float]:
    """The share that is found in lists of 40, and how likely picks that know nothing find as many."""
    found = Learned(rank=True, pairs=pairs)(observations)
    named = picks(torch.stack([one.scores for one in found if one.scores is not None]))
    return float(named.diagonal().mean()), luck(named.numpy(), torch.arange(len(named))[:, None].numpy())


class Zeros(Defense):
    """Sends nothing."""

    def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]  # noqa: ARG002
        return {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}


class PureNoise(Defense):
    """Sends what it draws, and nothing of the gradient."""

    def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]
        return {name: step.rng.normal(tensor.shape, tensor) for name, tensor in gradient.items()}


@pytest.mark.integration
@pytest.mark.parametrize("defense", [Sign(), Quantised(bits=2)], ids=["sign", "2 bits"])
def test_examples_are_recognised_and_rebuilt_through_a_black_box(
    defense: Defense, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "STEPS", 150)
    observations = seen(defense)
    share, by_luck = recognised(observations)
    assert share >= 0.9, "all 40 are, of these and of three times 40 others"
    assert by_luck < 0.001
    pictures = torch.cat([one.inputs for one in Learned(pairs=PAIRS)(observations)])
    mean = torch.cat([one.inputs for one in Learned(pairs=PAIRS).prior_only()(observations)])  # type: ignore[misc]
    truth = PRIVATE.batch(range(40)).inputs
    assert (pictures - truth).square().mean() < 0.5 * (mean - truth).square().mean()


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["zeros", "noise", "somebody else's"])
def test_an_update_that_holds_nothing_tells_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "STEPS", 150)
    observations = seen({"zeros": Zeros(), "noise": PureNoise()}.get(kind, Sign()))
    if kind == "somebody else's":
        monkeypatch.setitem(globals(), "PRIVATE", STRANGERS)
        others = seen(Sign())
        observations = [replace(one, reply=other.reply) for one, other in zip(observations, others, strict=True)]
    share, by_luck = recognised(observations)
    assert by_luck > 0.01, f"{share:.0%} of 40 are recognised"
    if kind == "zeros":
        assert share == pytest.approx(1 / 40), "all candidates fit alike"
    if kind != "somebody else's":
        rebuilt = Learned(pairs=PAIRS)(observations)
        told = learned._memory.popitem()[1][0].measured
        assert told[1] < 0.05, "nor does it claim to tell public ones"
        truth, mean = (PRIVATE.batch(range(40)).inputs, PUBLIC.batch(range(len(PUBLIC))).inputs.mean(0))
        error = (torch.cat([one.inputs for one in rebuilt]) - truth).square().mean()
        assert error > 0.95 * (mean - truth).square().mean(), "the mean picture is all that it can draw"


def test_it_is_kept_for_defenses_of_ours_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observations = seen(DEFENSES.build("sparsify"), images=2)
    first = Learned(pairs=400)(observations)
    (path,) = (tmp_path / "cache" / "learned").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    learned._memory.clear()
    with monkeypatch.context() as patch:
        patch.setattr(learned, "make_pairs", lambda *_: pytest.fail("it was learned before"))
        again = Learned(pairs=400)(observations)
    assert torch.equal(first[1].inputs, again[1].inputs)
    learned._memory.clear()
    path.write_bytes(path.read_bytes()[:1000])
    anew = Learned(pairs=400)(observations)
    assert torch.equal(first[1].inputs, anew[1].inputs), "a damaged file is made again, and to the same numbers"


def test_nothing_is_kept_of_a_defense_that_is_an_object(tmp_path: Path) -> None:
    Learned(pairs=400)(seen(Sign(), images=1))
    assert not (tmp_path / "cache" / "learned").exists()


def test_public_data_hold_nothing_that_the_private_set_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    private = PUBLIC.subset(range(100))
    half = replace(private, images=private.batch(range(100)).inputs.half())  # type: ignore[call-arg,return-value]
    monkeypatch.setattr(public_data, "load", lambda _: PUBLIC)
    for data in (private, half):
        left = PublicImages.apart_from(data)("blots")
        shown = {image.numpy().tobytes() for image in left.batch(range(len(left))).inputs}
        assert not shown & {image.numpy().tobytes() for image in private.batch(range(100)).inputs}
        assert 1900 < len(left) <= 2000
    (one,) = seen(Sign(), images=1)
    with pytest.raises(GradveilError, match=r"needs 2,000 public examples .* has 1,\d\d\d"):
        Learned(pairs=400)(replace(one, public=lambda _: PublicImages.apart_from(PUBLIC.subset(range(200)))("blots")))


def test_the_usual_public_data_are_looked_through_once_and_files_of_the_user_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(public_data, "load", lambda spec: loaded.append(spec) or PUBLIC)
    public_data._kept_apart.cache_clear()
    apart = replace(PublicImages.apart_from(PUBLIC.subset(range(10))), usual="usual")
    sizes = [len(apart(spec)) for spec in (None, "usual", "own", "own")]
    other = replace(PublicImages.apart_from(PUBLIC.subset(range(20))), usual="usual")
    assert len(other()) < sizes[0], "other private images, other public ones"
    public_data._kept_apart.cache_clear()
    assert loaded == ["usual", "own", "own", "usual"]
    assert len(set(sizes)) == 1


def test_the_usual_public_data_is_the_other_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_data, "is_fetched", lambda name: name == "mnist")
    assert public_data.usual_public(SAMPLES) == "mnist:split=train"
    assert public_data.usual_public(replace(SAMPLES, name="mnist train")) == "mnist:split=test"
    assert public_data.usual_public(load("cifar10-samples")) is None
    assert not assets.is_fetched("mnist"), "the cache of this test is empty"


def test_without_public_data_it_refuses_in_one_line() -> None:
    (one,) = seen(Sign(), images=1)
    with pytest.raises(GradveilError, match="no public examples come with this reply"):
        Learned()(replace(one, public=None))
    with pytest.raises(GradveilError, match="is a name alone here"):
        Learned()(replace(one, built_defense=None))


def test_it_chooses_only_if_asked_to() -> None:
    assert Knowledge.CANDIDATES in Learned(rank=True).requires
    assert Knowledge.CANDIDATES not in Learned().requires


@pytest.mark.parametrize(
    ("defense", "size"),
    [(Defense(), 1), (Defense(), 3), (LowDecimals(), 2), (PublicMixing(), 1), (DEFENSES.build("noise"), 2)],
)
def test_many_replies_at_once_are_those_of_single_clients(defense: Defense, size: int) -> None:
    one = seen(defense, images=size, batch_size=size)[0]
    inputs, labels = (tensor.unflatten(0, (-1, size)) for tensor in vars(PRIVATE.batch(range(4 * size))).values())
    together = DefendedClients(one, size).replies(inputs, labels, first=5)
    client = SimulatedClient(one.module, recipe=Recipe(), defense=defense)
    for place in range(4):
        batch = PRIVATE.batch(range(place * size, (place + 1) * size))
        alone = client.reply(one.sent, batch, Stream.seeded(0, "learned", 5 + place)).update
        for name, tensor in alone.items():
            away, near = (together[name][place] - tensor).abs(), 2e-5 + 1e-3 * (tensor.abs() + tensor.std())
            if isinstance(defense, LowDecimals):  # an entry on the edge between two steps of its grid falls to either
                assert (away > near).double().mean() < 0.002
                near = near + defense.grid
            assert bool((away <= near).all()), name


def test_the_memory_of_a_defense_is_neither_used_nor_changed() -> None:
    defense = TopWithFeedback()
    one = seen(TopWithFeedback(), images=1)[0]
    clients = DefendedClients(replace(one, built_defense=defense), 1)
    batch = PRIVATE.batch([3, 3])
    sent = clients.replies(batch.inputs[:, None], batch.labels[:, None], first=0)
    for tensor in sent.values():
        torch.testing.assert_close(tensor[0], tensor[1])
    assert defense._kept == {}


@pytest.mark.integration
def test_a_defense_with_memory_is_learned_in_the_round_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "STEPS", 150)
    observations = seen(TopWithFeedback(), round_number=2)
    inputs, labels = (tensor[:, None] for tensor in vars(PRIVATE.batch(range(3))).values())
    made = DefendedClients(observations[0], 1).replies(inputs, labels, first=0)
    first = DefendedClients(replace(observations[0], round_number=1), 1).replies(inputs, labels, first=0)
    for name, tensor in made.items():  # nothing is drawn, so that they are what the clients themselves sent
        torch.testing.assert_close(tensor, torch.stack([one.reply[name] for one in observations[:3]]))
        assert not torch.allclose(tensor, first[name]), "what was left in the first round is in it"
    share, by_luck = recognised(observations, pairs=600)
    assert share >= 0.8, "95 to 100% of four times 40 were: 600 pairs teach it less than 1,000"
    assert by_luck < 0.001


def test_batches_and_several_local_steps_have_a_decoder_too() -> None:
    recipe = Recipe(sends="delta", lr=0.05, epochs=2)
    found = Learned(pairs=400)(seen(Sign(), images=4, batch_size=2, recipe=recipe))
    assert [one.inputs.shape for one in found] == [(2, 1, 28, 28)] * 2
    ranked = Learned(rank=True, pairs=400)(seen(Sign(), images=4, batch_size=2, recipe=recipe))
    assert all(one.scores is not None and len(one.scores) == 40 for one in ranked)


def test_slow_defenses_get_fewer_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = seen(Sign(), images=1)
    monkeypatch.setattr(parts, "SECONDS", 1e-9)
    monkeypatch.setattr(parts, "SLOWEST", 500)
    monkeypatch.setattr(parts, "FASTEST", 1000)
    assert len(parts.make_pairs(one, PUBLIC, 1, None).labels) == 500


class SlowAtFirst(Sign):
    """Takes time, and makes what it keeps for all its copies, when it is used for the first time."""

    kept: ClassVar[list[torch.Tensor]] = []

    def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]
        if not self.kept:
            time.sleep(0.2)
            self.kept.extend(torch.ones(3) * number for number in range(10_000))
        return super().on_gradient(gradient, step)


def test_operations_decide_how_many_pairs_there_are_and_time_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FASTEST", 800)
    monkeypatch.setattr(parts, "SLOWEST", 200)
    (one,) = seen(Sign(), images=1)
    batch, clients = PUBLIC.batch(range(parts.TRIED)), DefendedClients(one, 1)
    with CostMeter() as cost:
        clients.replies(batch.inputs[:, None], batch.labels[:, None], first=0)
    slow = replace(one, defense=DEFENSES.describe(SlowAtFirst()), built_defense=SlowAtFirst())
    for share, expected in ((1.1, 800), (0.9, 400), (0.1, 200)):
        SlowAtFirst.kept.clear()
        monkeypatch.setattr(parts, "SECONDS", share * 800 * cost.seconds / parts.TRIED)
        made = [parts.make_pairs(observed, PUBLIC, 1, None) for observed in (slow, slow, one)]
        assert [len(pairs.labels) for pairs in made] == [expected] * 3
        assert torch.equal(made[0].entries, made[1].entries)
