"""Ways to hold ``gradveil.defend_update`` wrong: each is refused in one line, or what it returns is defended.

Integers and booleans pass as they are: counters of batch norm, masks. Everything floating is defended. What the
transforms cannot work on is refused: complex, sparse, quantised and meta tensors, and values that are not finite.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradveil
from gradveil.core.errors import GradveilError
from gradveil.defenses import Defense, Transform

SIGMA = 100.0
SECRET = {"w": torch.linspace(-1, 1, 12).view(3, 4), "b": torch.linspace(0, 1, 3)}


class Own(Transform):
    """A transform of the user's own."""

    def __init__(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        super().__init__(at="update")
        self.change = change

    def transform(self, tree, rng, log):  # type: ignore[no-untyped-def]  # noqa: ARG002
        return self.change(tree)


@dataclass(frozen=True)
class Way:
    name: str
    must: Literal["refused", "defended"]
    update: Any
    defense: Any


def ways() -> Iterator[Way]:
    """With noise of 100 on values of at most 1, what is defended is far from what it was."""
    noise = f"noise:sigma={SIGMA}"
    w = SECRET["w"]

    def given(name: str, must: Literal["refused", "defended"], odd: Any, defense: Any = noise) -> Way:
        return Way(name, must, {**{n: t.clone() for n, t in SECRET.items()}, "odd": odd}, defense)

    yield given("complex numbers", "refused", w.to(torch.complex64))
    yield given("only the imaginary part of complex numbers", "defended", w.to(torch.complex64).imag + 1)
    yield given("NaN", "refused", torch.full((3,), float("nan")))
    yield given("infinity", "refused", torch.tensor([1.0, float("inf")]))
    yield given("half precision", "defended", w.half())
    yield given("bfloat16", "defended", w.bfloat16())
    yield given("double precision", "defended", w.double())
    yield given("8-bit floats", "refused", w.to(torch.float8_e4m3fn))
    yield given("a sparse tensor", "refused", w.to_sparse())
    yield given("a sparse tensor by rows", "refused", torch.ones(3, 4).to_sparse_coo().coalesce())
    yield given("a nested list", "refused", w.tolist())
    yield given("a numpy array", "refused", w.numpy())
    yield given("a number", "refused", 0.5)
    yield given("None", "refused", None)
    yield given("a meta tensor", "refused", w.to("meta"))
    yield given("a tensor that asks for a gradient", "defended", w.clone().requires_grad_())
    yield given("a tensor with a history", "defended", w.clone().requires_grad_() * 2)
    yield given("a parameter", "defended", nn.Parameter(w.clone()))
    yield given("a subclass of Tensor", "defended", w.clone().as_subclass(type("Tagged", (Tensor,), {})))
    yield given("a transposed view", "defended", w.T)
    yield given("an expanded view", "defended", torch.ones(1).expand(5))
    yield Way("a view of another tensor in the update", "defended", {"w": w, "odd": w[0]}, noise)
    yield given("a scalar", "defended", torch.tensor(0.5))
    yield given("an empty tensor", "defended", torch.zeros(0))
    yield given("an inference tensor", "defended", _inferred())
    yield given("a number for a defense", "refused", w, 0.1)
    yield given("no defense", "refused", w, None)
    yield given("a class for a defense", "refused", w, Own)
    yield given("an unknown defense", "refused", w, "nois")
    yield given("a defense that needs the examples", "refused", w, "dp")
    yield given("a defense that needs the model", "refused", w, "soteria")
    yield given("clipping of every example", "refused", w, "clip:bound=1,per=example")
    yield given("a chain in which one link needs the model", "refused", w, f"censor+{noise}")
    yield given("a defense of one's own that only changes gradients", "refused", w, type("Late", (Defense,), {})())
    yield given("a transform that returns fewer names", "refused", w, Own(lambda t: {"w": torch.ones_like(t["w"])}))
    yield given("a transform that returns more names", "refused", w, Own(lambda t: {**_ones(t), "more": torch.ones(2)}))
    yield given(
        "a transform that returns other names", "refused", w, Own(lambda t: {n.upper(): x for n, x in t.items()})
    )
    yield given("a transform that returns another shape", "refused", w, Own(lambda t: {**_ones(t), "w": torch.ones(5)}))
    yield given("a transform that returns NaN", "refused", w, Own(lambda t: {n: x / 0 * 0 for n, x in t.items()}))
    yield given("a transform that returns nothing", "refused", w, Own(lambda _: None))
    yield given("a transform that returns a list", "refused", w, Own(lambda t: list(_ones(t).values())))
    yield given("a transform that returns numbers", "refused", w, Own(lambda t: dict.fromkeys(t, 1.0)))
    yield given("a transform that works in place", "defended", w.clone(), Own(_in_place))
    yield given(
        "a transform in another precision", "defended", w, Own(lambda t: {n: x.double() for n, x in _ones(t).items()})
    )
    yield Way("an empty update", "refused", {}, noise)
    yield Way("integers only", "refused", {"n": torch.arange(3)}, noise)
    yield Way("names that are numbers", "refused", {0: w, 1: w}, noise)
    yield Way("a list of tensors", "refused", list(SECRET.values()), noise)
    yield Way("pairs of names and tensors", "refused", list(SECRET.items()), noise)
    yield Way("a tensor", "refused", w, noise)
    yield Way("a model", "refused", nn.Linear(3, 2), noise)
    yield Way("nothing", "refused", None, noise)
    yield Way("an ordered dictionary", "defended", OrderedDict(SECRET), noise)
    yield Way("a mapping that cannot be written", "defended", MappingProxyType(SECRET), noise)
    yield Way("a mapping of one's own", "defended", _Lazy(), noise)
    yield Way("two names for one tensor", "defended", {"w": w, "again": w}, noise)


def _ones(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, SIGMA) for name, tensor in tree.items()}


def _in_place(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    for tensor in tree.values():
        tensor.fill_(SIGMA)
    return tree


def _inferred() -> Tensor:
    with torch.inference_mode():
        return SECRET["w"].clone()


class _Lazy(Mapping[str, Tensor]):
    """Makes its tensors when asked, as readers of files do."""

    def __getitem__(self, name: str) -> Tensor:
        return SECRET[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(SECRET)

    def __len__(self) -> int:
        return len(SECRET)


def _kept(update: Any) -> Any:
    """A copy of what can be copied, to see afterwards that nothing was edited."""
    if not isinstance(update, Mapping):
        return {}
    return {
        name: tensor.detach().clone()
        for name, tensor in update.items()
        if isinstance(tensor, Tensor) and not tensor.is_meta and not tensor.is_sparse
    }


@pytest.mark.parametrize("way", [pytest.param(way, id=way.name.replace(" ", "_")) for way in ways()])
def test_misuse(way: Way) -> None:
    before = _kept(way.update)
    try:
        sent = gradveil.defend_update(way.update, defense=way.defense)
    except GradveilError as error:
        assert re.fullmatch(r"[^\n]{20,400}", str(error)), f"not one line: {error}"
        assert way.must == "refused", str(error)
    else:
        assert way.must == "defended", "nothing was refused"
        assert sent.keys() == way.update.keys()
        for name, tensor in sent.items():
            bare = way.update[name].detach()
            assert tensor.shape == bare.shape
            assert tensor.dtype == bare.dtype
            assert not tensor.requires_grad
            assert torch.isfinite(tensor).all()
            if bare.numel():
                assert (tensor - bare).double().square().mean().sqrt() > 1e-6 * SIGMA, f"{name} left bare"
    for name, tensor in before.items():
        torch.testing.assert_close(
            way.update[name].detach(), tensor, rtol=0, atol=0, equal_nan=True, msg=f"{name} edited"
        )


def test_no_way_is_named_twice() -> None:
    names = [way.name for way in ways()]
    assert len(names) == len(set(names)) >= 50


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_a_quantised_tensor_is_refused() -> None:
    quantised = torch.quantize_per_tensor(SECRET["w"], 0.1, 0, torch.qint8)
    with pytest.raises(GradveilError, match="odd"):
        gradveil.defend_update({**SECRET, "odd": quantised}, defense="noise")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_and_booleans_pass_as_they_are(dtype: torch.dtype) -> None:
    counter = torch.tensor([0, 1, 7]).to(dtype)
    sent = gradveil.defend_update({**SECRET, "counter": counter}, defense="noise:sigma=100")
    assert sent["counter"].dtype == dtype
    assert torch.equal(sent["counter"], counter)


def test_a_refusal_names_the_tensor() -> None:
    with pytest.raises(GradveilError, match=r"layer\.weight"):
        gradveil.defend_update({"layer.weight": torch.zeros(2, dtype=torch.complex64)}, defense="noise")
    with pytest.raises(GradveilError, match=r"layer\.bias"):
        gradveil.defend_update({"layer.bias": torch.tensor([float("nan")])}, defense="noise")


def test_a_seed_is_no_argument() -> None:
    with pytest.raises(TypeError, match="seed"):
        gradveil.defend_update(SECRET, defense="noise", seed=0)  # type: ignore[call-arg]


def test_two_calls_draw_noise_of_their_own() -> None:
    first, second = (gradveil.defend_update(SECRET, defense="noise:sigma=100") for _ in range(2))
    assert all((first[name] - second[name]).abs().max() > 1 for name in SECRET)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output, self.other = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Linear(8, 50)
        self.output.weight = self.embedding.weight


@pytest.mark.parametrize("defense", ["noise:sigma=100", "clip:bound=1+noise:sigma=100", "sparsify:rate=0.5"])
def test_tied_weights_are_sent_equal_so_that_a_mean_over_their_names_holds_all_noise(defense: str) -> None:
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    for update in (model.state_dict(), {name: t - before[name] for name, t in model.state_dict().items()}):
        sent = gradveil.defend_update(update, defense=defense)
        assert sent.keys() == update.keys()
        assert torch.equal(sent["embedding.weight"], sent["output.weight"])
        assert sent["embedding.weight"].data_ptr() != sent["output.weight"].data_ptr()
        assert (sent["embedding.weight"] - sent["other.weight"]).abs().max() > 0.1


def test_tied_weights_are_clipped_as_the_one_tensor_that_they_are() -> None:
    sent = gradveil.defend_update({"w": SECRET["w"], "again": SECRET["w"].clone()}, defense="clip:bound=1")
    assert sent["w"].norm().item() == pytest.approx(1, rel=1e-5)
    assert torch.equal(sent["w"], sent["again"])


def test_tensors_that_are_nearly_equal_get_noise_of_their_own() -> None:
    for other in (SECRET["w"].nextafter(torch.ones(())), SECRET["w"].double(), SECRET["w"].flip(0), SECRET["w"].T):
        sent = gradveil.defend_update({"w": SECRET["w"], "other": other}, defense="noise:sigma=100")
        assert (sent["w"].flatten() - sent["other"].flatten()).abs().max() > 1


def test_zeros_get_noise_of_their_own() -> None:
    """Equal noise would show that both layers did not train."""
    zeros = {"w": torch.zeros(3, 4), "v": torch.zeros(3, 4)}
    sent = gradveil.defend_update(zeros, defense="noise:sigma=100")
    assert (sent["w"] - sent["v"]).abs().max() > 1


def test_entries_of_one_expanded_tensor_get_noise_of_their_own() -> None:
    sent = gradveil.defend_update({"w": torch.ones(1).expand(50)}, defense="noise:sigma=100")["w"]
    assert len(set(sent.tolist())) == 50


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_noise_has_its_size_in_every_precision(dtype: torch.dtype) -> None:
    sent = gradveil.defend_update({"w": torch.zeros(4000, dtype=dtype)}, defense="noise:sigma=0.5")["w"]
    assert float(sent.double().std()) == pytest.approx(0.5, rel=0.1)
    assert np.isclose(float(sent.double().mean()), 0, atol=0.05)
