from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from torch import nn

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import norm, scaled
from gradveil.core.types import Params, Recipe
from gradveil.defenses import DEFENSES, Log, clip, shared
from gradveil.joint import UnsupportedError
from steps import SAMPLES, in_double, step_of, step_on


def test_tensors_above_the_bound_get_its_norm_and_the_others_stay() -> None:
    gradient, step = step_on("lenet:init=wide")
    lengths = {name: float(g.norm()) for name, g in gradient.items()}
    ordered = sorted(lengths.values())
    bound = (ordered[4] + ordered[5]) / 2  # no tensor lies exactly at it
    sent = DEFENSES.build(f"clip:bound={bound}").on_gradient(gradient, step)
    above = [name for name in gradient if lengths[name] > bound]
    assert 0 < len(above) < len(gradient)
    for name, g in gradient.items():
        if name in above:
            assert torch.allclose(sent[name], g * bound / lengths[name])
            assert float(sent[name].norm()) == pytest.approx(bound, rel=1e-5)
        else:
            assert torch.equal(sent[name], g)
    assert step.log.means() == {"clipped": len(above) / len(gradient)}


def test_global_clipping_keeps_the_direction_of_the_whole() -> None:
    gradient, step = step_on("lenet:init=wide")
    length = float(norm(gradient))
    sent = DEFENSES.build(f"clip:bound={length / 5},per=global").on_gradient(gradient, step)
    for name, expected in scaled(gradient, 0.2).items():
        assert torch.allclose(sent[name], expected, rtol=1e-5)
    same = DEFENSES.build(f"clip:bound={2 * length},per=global").on_gradient(gradient, step)
    assert all(torch.equal(same[name], g) for name, g in gradient.items())
    assert step.log.values("clipped") == (1.0, 0.0)


@pytest.mark.parametrize("model", ["convnet:width=8", "vit"])
def test_examples_are_clipped_as_in_a_plain_loop(model: str) -> None:
    step = in_double(step_on(model, examples=5)[1])
    singles = [step.gradient(step.batch.take(slice(i, i + 1))) for i in range(5)]
    lengths = [float(norm(g)) for g in singles]
    bound = sum(lengths) / 5
    expected: Params = {
        name: sum(g[name] * min(1.0, bound / length) for g, length in zip(singles, lengths, strict=True)) / 5
        for name in step.params
    }
    sent = DEFENSES.build(f"clip:bound={bound},per=example").on_gradient(step.gradient(), step)
    for name, tensor in expected.items():
        assert (sent[name] - tensor).norm() <= 1e-9 * tensor.norm() + 1e-12
    assert step.log.means() == {"clipped": sum(length > bound for length in lengths) / 5}


def refusing(_: object) -> NoReturn:
    raise UnsupportedError("so that vmap takes the gradients")


@pytest.mark.parametrize("model", ["resnet18", "vit"])
def test_gradients_through_shared_weights_are_those_of_vmap(model: str) -> None:
    step = in_double(step_on(model, examples=3)[1])
    found = shared.Examples(step).gradients(step.batch)
    for name, tensor in step.example_gradients().items():
        assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm() + 1e-12


@pytest.mark.parametrize("model", ["resnet18", "vit"])
def test_a_large_model_is_clipped_the_same_without_forming_gradients(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "EXAMPLES_AT_ONCE", 2)
    step = in_double(step_on(model, examples=3)[1])
    bound = float(clip.example_norms(step.example_gradients()).mean())
    found, clipped = clip._unformed(step, bound)
    monkeypatch.setattr(shared, "network_of", refusing)
    expected, as_well = clip._formed(step, bound)
    assert clipped == as_well
    assert list(found) == list(step.params), "noise is drawn in this order"
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm() + 1e-12


def test_gradients_of_a_small_model_are_formed() -> None:
    with pytest.raises(UnsupportedError, match="quicker"):
        clip._unformed(step_on("lenet", examples=2)[1], 1.0)


class Around(nn.Module):
    """Uses the weights of its first layer a second time, where no rule sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3072, 400), nn.Linear(400, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        outputs: torch.Tensor = self.last((self.first(x) + x.flip(1) @ self.first.weight.T).relu())
        return outputs


def test_a_model_that_goes_around_its_layers_is_found_out() -> None:
    torch.manual_seed(0)
    _, step = step_of(Around(), SAMPLES.batch(range(3)))
    with pytest.raises(UnsupportedError, match="rules do not give"):
        clip._unformed(step, 1.0)
    expected, _ = clip._formed(step, 1.0)
    sent = DEFENSES.build("clip:bound=1,per=example").on_gradient(step.gradient(), step)
    for name, tensor in expected.items():
        assert torch.equal(sent[name], tensor)


class Tokens(nn.Module):
    """Four tokens of an image through one layer, laid out in some way."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.enter, self.wide, self.back, self.last = (
            nn.Linear(*sides) for sides in ((768, 256), (256, 2048), (2048, 256), (256, 10))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.enter(x.reshape(len(x), 4, -1))
        if self.layout == "tokens first":
            h = h.transpose(0, 1)
        if self.layout == "flat":
            h = h.flatten(0, 1)
        h = h + self.back(self.wide(h).relu())
        if self.layout == "tokens first":
            h = h.transpose(0, 1)
        outputs: torch.Tensor = self.last(h.reshape(len(x), 4, -1).mean(dim=1))
        return outputs


@pytest.mark.parametrize("layout", ["examples first", "tokens first", "flat"])
@pytest.mark.parametrize("examples", [4, 6])
def test_every_example_is_clipped_alone_however_the_model_lays_them_out(layout: str, examples: int) -> None:
    torch.manual_seed(0)
    module, batch = Tokens(layout), SAMPLES.batch(range(examples))
    clip.clipped_mean(step_of(module, batch.take(slice(1)))[1], 1.0)  # one example alone tells nothing about layouts
    step = in_double(step_of(module, batch)[1])
    bound = float(clip.example_norms(step.example_gradients()).median())
    (found, expected) = clip.clipped_mean(step, bound), clip._formed(step, bound)[0]
    for name, tensor in shared.Examples(step).gradients(step.batch).items():
        right = step.example_gradients()[name]
        assert (tensor - right).norm() <= 1e-9 * right.norm() + 1e-12
        assert (found[name] - expected[name]).norm() <= 1e-9 * expected[name].norm() + 1e-12


def test_examples_in_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    step = in_double(step_on("lenet:init=wide", examples=5)[1])
    at_once = DEFENSES.build("clip:bound=1,per=example").on_gradient(step.gradient(), step)
    monkeypatch.setattr(clip, "ENTRIES_AT_ONCE", 2 * sum(p.numel() for p in step.params.values()))
    sizes = [len(each["fc.bias"]) for each in clip._in_chunks(step)]
    assert sizes == [2, 2, 1]
    in_chunks = DEFENSES.build("clip:bound=1,per=example").on_gradient(step.gradient(), step)
    for name, g in at_once.items():
        assert torch.allclose(in_chunks[name], g, rtol=1e-9, atol=1e-12)


def test_a_gradient_of_zeros_stays_zero() -> None:
    zero = {"w": torch.zeros(3)}
    for spec in ("clip", "clip:per=global"):
        sent = DEFENSES.build(spec).on_gradient(zero, step_on(examples=1)[1])
        assert torch.equal(sent["w"], zero["w"])


def test_the_update_is_clipped_once() -> None:
    update, log = {"w": torch.tensor([3.0, 4.0])}, Log()
    defense = DEFENSES.build("clip:bound=1,at=update")
    assert defense.on_gradient(update, step_on(examples=1)[1]) is update
    assert torch.allclose(defense.on_update(update, Stream.seeded(0), log)["w"], torch.tensor([0.6, 0.8]))
    assert log.means() == {"clipped": 1.0}


def test_batch_norm_in_train_mode_has_no_gradients_of_single_examples() -> None:
    model = step_on("convnet:width=8", examples=2)[1].model.module
    client = Client(model, recipe=Recipe(train_mode=True), defense=DEFENSES.build("clip:per=example"))
    with pytest.raises(GradveilError, match=r"'body\.bn0' is batch norm in train mode"):
        client.reply(client.model.params, SAMPLES.batch(range(2)), Stream.seeded(0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [("clip:bound=0", "bound is above 0, not 0"), ("clip:per=example,at=update", "per=example needs at=step")],
)
def test_impossible_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        DEFENSES.build(spec)
