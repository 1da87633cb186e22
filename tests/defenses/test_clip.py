from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import norm, scaled, subtract
from gradveil.core.types import Batch, Params, Recipe
from gradveil.defenses import DEFENSES, Log, Step, clip
from gradveil.engine import example_gradients, example_pass, examples, why_not_shared
from gradveil.models import Functional
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


@pytest.mark.integration
@pytest.mark.parametrize("model", ["convnet:width=8", "vit"])
def test_examples_are_clipped_as_in_a_plain_loop(model: str) -> None:
    step = in_double(step_on(model, examples=5)[1])
    singles = [step.gradient(step.batch.take(slice(i, i + 1))) for i in range(5)]
    lengths = [float(norm(g)) for g in singles]
    bound = sum(lengths) / 5
    expected: Params = {
        name: sum(g[name] * min(1.0, bound / length) for g, length in zip(singles, lengths, strict=True)) / 5  # type: ignore[misc]
        for name in step.params
    }
    sent = DEFENSES.build(f"clip:bound={bound},per=example").on_gradient(step.gradient(), step)
    for name, tensor in expected.items():
        assert (sent[name] - tensor).norm() <= 1e-9 * tensor.norm() + 1e-12
    assert step.log.means() == {"clipped": sum(length > bound for length in lengths) / 5}


@pytest.mark.integration
@pytest.mark.parametrize("model", ["resnet18", "vit"])
def test_gradients_through_shared_weights_are_those_of_vmap(model: str) -> None:
    step = in_double(step_on(model, examples=3)[1])
    found = example_gradients(step, step.batch)
    for name, tensor in step.example_gradients().items():
        assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm() + 1e-12


@pytest.mark.integration
@pytest.mark.parametrize("model", ["resnet18", "vit"])
def test_a_large_model_is_clipped_the_same_without_forming_gradients(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "EXAMPLES_AT_ONCE", 2)
    step = in_double(step_on(model, examples=3)[1])
    bound = float(clip.example_norms(step.example_gradients()).mean())
    unformed = clip._unformed(step, bound)
    assert unformed is not None
    found, clipped = unformed
    monkeypatch.setattr(examples, "why_not_shared", lambda _: "so that vmap takes the gradients")
    expected, as_well = clip._formed(step, bound)
    assert clipped == as_well
    assert list(found) == list(step.params), "noise is drawn in this order"
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm() + 1e-12


def test_gradients_of_a_small_model_are_formed() -> None:
    _, step = step_on("lenet", examples=2)
    assert "quicker" in why_not_shared(step)
    assert clip._unformed(step, 1.0) is None


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
    assert "rules do not give" in why_not_shared(step)
    assert clip._unformed(step, 1.0) is None
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
    for name, tensor in example_gradients(step, step.batch).items():
        right = step.example_gradients()[name]
        assert (tensor - right).norm() <= 1e-9 * right.norm() + 1e-12
        assert (found[name] - expected[name]).norm() <= 1e-9 * expected[name].norm() + 1e-12


class Scaled(nn.Module):
    """Rounds to the 16 bits that the largest entry of the whole batch leaves."""

    def forward(self, x: Tensor) -> Tensor:
        step = x.detach().abs().amax() / 32767
        return x + ((x / step).round() * step - x).detach()


class Frames(nn.Module):
    """One network on each frame of [n, time, features]: as many calls as frames, or time before examples."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.calls, self.net = calls, nn.Sequential(nn.Linear(1024, 1100), nn.ReLU(), nn.Linear(1100, 10))

    def forward(self, x: Tensor) -> Tensor:
        if self.calls:
            return torch.stack([self.net(frame) for frame in x.unbind(1)]).mean(0)
        rows: Tensor = self.net(x.transpose(0, 1).flatten(0, 1))
        return rows.unflatten(0, (x.shape[1], -1)).mean(0)


class DeadBranch(nn.Module):
    """A parameter that seems to have an axis for the batch, in a branch behind a layer of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.last, self.gate = nn.Linear(1024, 1100), nn.Linear(1100, 10), nn.Linear(1100, 1100)
        self.mix = nn.Parameter(torch.randn(1, 1100, 1100) / 20)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).relu()
        outputs: Tensor = self.last(h + self.gate(h @ self.mix[0]))
        return outputs


def loud(n: int, *shape: int) -> Batch:
    """Examples of which the first is much larger than others, and has another label."""
    rng = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand(n, *shape, generator=rng), torch.zeros(n, dtype=torch.long)
    inputs[0] *= 1e4
    labels[0] = 1
    return Batch(inputs, labels)


def moved(step: Step, bound: float) -> float:
    """How far the first example moves the sum of clipped gradients, in bounds."""
    rest = replace(step, batch=step.batch.take(slice(1, None)))
    whole = scaled(clip.clipped_mean(step, bound), len(step.batch) / bound)
    return float(norm(subtract(whole, scaled(clip.clipped_mean(rest, bound), len(rest.batch) / bound))))


def large(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Linear(1024, 1100), nn.ReLU(), nn.Linear(1100, 10))


def test_no_example_reaches_others_through_a_layer_of_ones_own() -> None:
    torch.manual_seed(0)
    _, step = step_of(large(Scaled()), loud(16, 1024))
    assert not why_not_shared(step), "the rules serve it, so that gradients are not formed"
    assert moved(step, 1.0) <= 1.0001


@pytest.mark.parametrize("calls", [True, False])
def test_inputs_of_another_shape_may_pass_the_layers_in_another_way(calls: bool) -> None:
    torch.manual_seed(0)
    _, step = step_of(Frames(calls=calls), loud(2, 1, 1024))
    clip.clipped_mean(step, 0.01)
    assert moved(replace(step, batch=loud(8, 16, 1024)), 0.01) <= 1.0001
    one = clip.clipped_mean(replace(step, batch=loud(1, 16, 1024)), 0.01)
    assert float(norm(one)) == pytest.approx(0.01, rel=1e-4)


def test_a_branch_that_is_dead_at_first_is_judged_alive() -> None:
    torch.manual_seed(0)
    _, step = step_of(DeadBranch(), loud(8, 1024))
    clip.clipped_mean(step, 0.01)
    alive = replace(step, params={**step.params, "gate.weight": torch.randn(1100, 1100)})
    assert moved(alive, 0.01) <= 1.001
    few = replace(alive, batch=loud(3, 1024))
    found, right = example_gradients(few, few.batch), few.example_gradients()
    assert float(norm(subtract(found, right))) <= 1e-4 * float(norm(right))


class DeadAround(Around):
    """Goes around a layer only where a factor is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.factor.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        factor = self.factor(torch.ones_like(x[:, :1]))
        outputs: Tensor = self.last((self.first(x) + factor * (x.flip(1) @ self.first.weight.T)).relu())
        return outputs


def test_rules_are_judged_beside_the_parameters_as_well() -> None:
    torch.manual_seed(0)
    _, step = step_of(DeadAround(), SAMPLES.batch(range(2)))
    assert "rules do not give" in why_not_shared(step)
    assert example_pass(step, step.batch) is None


@pytest.mark.parametrize("own", [False, True])
def test_sums_are_not_rounded_under_autocast(own: bool) -> None:
    """Neither under that of the caller, nor where the model switches its own on."""

    class Half(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=own):
                return super().forward(x)

    torch.manual_seed(0)
    batch = loud(256, 1024)
    batch.inputs[1:] = batch.inputs[1] + 0.01 * batch.inputs[1:]
    batch.inputs[0] *= 1e-4
    _, step = step_of(Half(nn.Linear(1024, 1100), nn.Tanh(), nn.Linear(1100, 10)), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moved(step, 1.0) <= 1.0001
        assert all(g.dtype == torch.float32 for g in clip.clipped_mean(step, 1.0).values())


def test_a_large_model_that_keeps_its_outputs_shares_its_weights() -> None:
    class Kept(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept

    _, step = step_of(Kept(nn.Linear(1024, 1100), nn.ReLU(), nn.Linear(1100, 10)), loud(3, 1024))
    for _ in range(2):
        step.gradient()
        assert example_pass(step, step.batch) is not None


def test_an_example_whose_length_is_unknown_is_formed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it sent all others another way, it would move them by what the two ways differ in."""
    torch.manual_seed(0)
    batch, formed, sizes = loud(5, 1024), clip._formed, []
    batch.inputs[0] *= 1e30
    _, step = step_of(large(nn.Identity()), batch)
    monkeypatch.setattr(clip, "_formed", lambda part, bound: sizes.append(len(part.batch)) or formed(part, bound))
    assert moved(step, 1.0) <= 1.0001
    assert sizes == [1]


class Cancelling(nn.Module):
    """Slopes of +-5e8 at a layer with few weights, which cancel over the positions of an example of ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.flat, self.wide = layer, nn.Linear(1024, 2, bias=False), nn.Linear(1100, 1100)
        signs = torch.ones(1024)
        signs[1::2] = -1
        with torch.no_grad():
            for p in self.parameters():
                p.zero_()
            self.flat.weight.copy_(torch.stack([1e9 * signs, -1e9 * signs]))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(0 * x.flatten(1)[:, :1].expand(-1, 1100))
        outputs: Tensor = self.flat((x * self.layer(x)).flatten(1)) + wide[:, :2]
        return outputs


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 1, 1), nn.GroupNorm(1, 1)])
def test_slopes_of_one_example_that_cancel_swallow_no_other(layer: nn.Module) -> None:
    """Its gradient is short and is kept whole. In a sum over all examples its slopes took the digits of the others."""
    inputs = torch.zeros(64, 1, 32, 32)
    inputs[1:, 0, 0, 0] = 1e-9 * torch.linspace(1, 2, 63)
    inputs[0] = 1
    _, step = step_of(Cancelling(layer), Batch(inputs, torch.zeros(64).long()))
    assert moved(step, 1.0) <= 1.0001


class Positions(nn.Module):
    """A layer for each position, of which short inputs reach the first ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(1024, width) for _ in range(3))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        each = [layer(x[:, place]) for place, layer in enumerate(self.each) if place < x.shape[1]]
        outputs: Tensor = self.last(torch.stack(each).mean(0).relu())
        return outputs


@pytest.mark.parametrize(("width", "way"), [(600, "shared"), (20, "vmap"), (20, "loop")])
def test_parameters_that_no_example_reaches_get_noise_alone(
    width: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    _, step = step_of(Positions(width), loud(4, 2, 1024))
    if way == "shared":
        assert example_pass(step, step.batch) is not None
    if way == "loop":
        monkeypatch.setattr(Step, "example_gradients", refusing_vmap)
    mean = clip.clipped_mean(step, 1.0)
    assert list(mean) == list(step.params)
    assert not mean["each.2.weight"].any()
    assert mean["each.1.weight"].any()
    sent = DEFENSES.build("dp:sigma=2,bound=1").on_gradient(mean, step)
    assert sent["each.2.weight"].std().item() == pytest.approx(2 / 4, rel=0.02)


def refusing_vmap(*_: object) -> NoReturn:
    raise RuntimeError("vmap cannot do it")


class Recurrent(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body, self.last = make(), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.body(x)[0].mean(1))
        return outputs


class Odd(nn.Module):
    """What vmap does not do: recomputed parts, a branch by the data, and a memory of the examples before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.before = nn.Linear(4, 6), nn.Linear(6, 10), 0.0

    def forward(self, x: Tensor) -> Tensor:
        x, self.before = x + self.before, self.before + 1e3
        h: Tensor = checkpoint(self.first, x.flip(1) if x.mean() > 0.5 else x, use_reentrant=False)
        outputs: Tensor = self.last(h.mean(1))
        return outputs


LOOPED = {
    "gru": lambda: Recurrent(lambda: nn.GRU(4, 6, batch_first=True)),
    "rnn": lambda: Recurrent(lambda: nn.RNN(4, 6, batch_first=True)),
    "odd": Odd,
}


@pytest.mark.parametrize("model", LOOPED)
def test_models_that_vmap_cannot_do_go_one_example_after_another(model: str) -> None:
    torch.manual_seed(0)
    module, batch = LOOPED[model](), Batch(torch.rand(5, 3, 4), torch.arange(5))
    step = replace(step_on("lenet", examples=1)[1], model=Functional(module, train_mode=None), batch=batch)
    step = replace(step, params=step.model.params)
    singles = [examples.one_by_one(step, batch.take(slice(i, i + 1))) for i in range(5)]
    each = example_gradients(step, batch)
    for name, tensor in each.items():
        assert torch.equal(tensor, torch.cat([one[name] for one in singles]))
    outside = module.train()(batch.inputs[:1])
    right = torch.autograd.grad(step.loss(outside, batch.labels[:1]), list(module.parameters()))
    for tensor, expected in zip(each.values(), right, strict=True):
        assert torch.allclose(tensor[0], expected, atol=1e-6)
    lengths = clip.example_norms(each)
    assert moved(step, float(lengths.min()) / 2) <= 1.0001


class Keeping(nn.Module):
    """Keeps an output of its last pass, as some do with attention weights to look at; GRUs do not go through vmap."""

    def __init__(self, *, gru: bool) -> None:
        super().__init__()
        self.body, self.last = nn.GRU(4, 6, batch_first=True) if gru else None, nn.Linear(6 if gru else 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.mean(1) if self.body is None else self.body(x)[0].mean(1)
        self.kept = self.last(self.kept)
        return self.kept


@pytest.mark.parametrize("gru", [False, True])
def test_a_model_that_keeps_its_outputs_is_no_trouble(gru: bool) -> None:
    torch.manual_seed(0)
    gradient, step = step_of(Keeping(gru=gru), Batch(torch.rand(5, 3, 4), torch.arange(5)))
    for _ in range(2):
        found = clip.clipped_mean(step, 1e9)
        assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in gradient.items())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.body(x, x, x)[0].mean(1))
        return outputs


class Dropping(nn.Linear):
    def __init__(self) -> None:
        super().__init__(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x.flatten(1)), 0.1)


class Drawing(Recurrent):
    """Stochastic depth by random numbers that are not torch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(lambda: nn.GRU(4, 6, batch_first=True))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return -outputs if self.draw() < 0.5 else outputs


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(x.reshape(5, 12))
        return outputs


@pytest.mark.parametrize(
    "make", [Attention, lambda: Recurrent(lambda: nn.LSTM(4, 6, num_layers=2, dropout=0.1, batch_first=True))]
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_dropout_inside_of_layers_is_off(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, batch = make().train(), Batch(torch.rand(5, 3, 4), torch.arange(5))
    step = replace(step_on("lenet", examples=1)[1], model=Functional(model, train_mode=None), batch=batch)
    found = clip.clipped_mean(replace(step, params=step.model.params), 1e9)
    value = step.loss(model.eval()(batch.inputs), batch.labels)
    for gradient, tensor in zip(torch.autograd.grad(value, list(model.parameters())), found.values(), strict=True):
        torch.testing.assert_close(tensor, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Dropping, "draws random numbers.*eval mode"),
        (lambda: Drawing(random.random), "draws random"),
        (lambda: Drawing(lambda: np.random.rand()), "draws random"),  # noqa: NPY002
        (Fixed, "one example alone cannot be taken"),
    ],
)
def test_what_cannot_be_done_for_one_example_is_said_in_one_line(make: Callable[[], nn.Module], message: str) -> None:
    batch = Batch(torch.rand(5, 3, 4), torch.arange(5))
    step = replace(step_on("lenet", examples=1)[1], model=Functional(make().train(), train_mode=None), batch=batch)
    with pytest.raises(GradveilError, match=message):
        clip.clipped_mean(replace(step, params=step.model.params), 1.0)


class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2000, 600), nn.Linear(600, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.one_hot(x.long(), 2000).float().mean(1)
        outputs: Tensor = self.last(self.first(rows).relu())
        return outputs


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_whole_numbers_go_through_a_large_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 2000, (4, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    _, step = step_of(OneHot(), Batch(tokens, torch.arange(4)))
    found, right = clip.clipped_mean(step, 1e9), step.gradient()
    assert float(norm(subtract(found, right))) <= 1e-4 * float(norm(right))


def test_examples_in_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    step = in_double(step_on("lenet:init=wide", examples=5)[1])
    at_once = DEFENSES.build("clip:bound=1,per=example").on_gradient(step.gradient(), step)
    monkeypatch.setattr(clip, "ENTRIES_AT_ONCE", 2 * sum(p.numel() for p in step.params.values()))
    sizes: list[int] = []

    def noted(each: Params) -> Params:
        sizes.append(len(each["fc.bias"]))
        return each

    clip.mean_over_examples(step, noted)
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
    client = SimulatedClient(model, recipe=Recipe(train_mode=True), defense=DEFENSES.build("clip:per=example"))
    with pytest.raises(GradveilError, match=r"'body\.bn0' is batch norm in train mode"):
        client.reply(client.model.params, SAMPLES.batch(range(2)), Stream.seeded(0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [("clip:bound=0", "bound is above 0, not 0"), ("clip:per=example,at=update", "per=example needs at=step")],
)
def test_impossible_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        DEFENSES.build(spec)
