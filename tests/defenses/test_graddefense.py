from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Recipe
from gradveil.defenses import DEFENSES, Step, graddefense
from gradveil.defenses.graddefense import Estimate, GradDefense, equal_slices, sensitivities
from gradveil.defenses.public import public_images
from steps import SAMPLES, in_double, step_of, step_on


def root_set(count: int) -> Batch:
    return public_images("samples", SAMPLES.batch([0]).inputs, count)


def slow_sensitivity(step: Step, root: Batch, name: str) -> float:
    """For one tensor, example by example: the derivative of the sum of its gradient by the input, and its norm."""
    lengths = []
    for i in range(len(root)):
        inputs = root.inputs[i : i + 1].clone().requires_grad_()
        tensor = step.params[name].clone().requires_grad_()
        loss = step.loss_at({**step.params, name: tensor}, Batch(inputs, root.labels[i : i + 1])) / len(root)
        (gradient,) = torch.autograd.grad(loss, tensor, create_graph=True)
        (moved,) = torch.autograd.grad(gradient.sum(), inputs)
        lengths.append(float(moved.norm()))
    return sum(lengths) / len(lengths)


@pytest.mark.integration
@pytest.mark.parametrize("model", ["lenet", "convnet:width=8", "vit:depth=1,dim=48"])
def test_sensitivities_are_those_of_a_loop_over_tensors_and_examples(model: str) -> None:
    step, root = in_double(step_on(model)[1]), root_set(4)
    root = Batch(root.inputs.double(), root.labels)
    found = sensitivities(step, root)
    assert list(found) == list(step.params)
    largest = max(found.values())
    for name in list(found)[::3]:
        # The sum over the last bias is a sum of differences of probabilities: zero up to rounding.
        assert found[name] == pytest.approx(slow_sensitivity(step, root, name), rel=1e-5, abs=1e-9 * largest), name


def test_parts_of_the_root_set_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    step, root = in_double(step_on("lenet:init=wide")[1]), root_set(7)
    root = Batch(root.inputs.double(), root.labels)
    whole = sensitivities(step, root)
    monkeypatch.setattr(graddefense, "INPUTS_AT_ONCE", {"cpu": 3 * 3072})
    assert sensitivities(step, root) == pytest.approx(whole, rel=1e-9, abs=1e-9 * max(whole.values()))


@pytest.mark.integration
@pytest.mark.parametrize("model", ["lenet", "convnet:width=8", "mlp", "vgg11:batch_norm=false"])
def test_random_directions_estimate_all_tensors_to_some_percent(model: str) -> None:
    _, step = step_on(model)
    root = root_set(8)
    exact, found = sensitivities(step, root), Estimate(step, root, 32)(step)
    assert found.keys() == exact.keys()
    ratios = [found[name] / exact[name] for name in exact if exact[name] > 1e-4 * max(exact.values())]
    # 256 directions in all: a standard error of 1 / sqrt(512) for each tensor
    assert max(abs(ratio - 1) for ratio in ratios) < 4 / 512**0.5


class Odd(nn.Module):
    """Uses the weight of one layer a second time, where nobody can watch it, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3072, 16, bias=False), nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        hidden = torch.tanh(self.first(flat)) + nn.functional.linear(flat.square(), self.first.weight)
        return self.last(hidden * self.scale)


def test_what_cannot_be_watched_is_computed_exactly() -> None:
    _, step = step_of(Odd(), SAMPLES.batch(range(2)))
    root = root_set(6)
    assert Estimate(step, root, 4)(step).keys() == {"last.weight", "last.bias"}
    exact, mixed = sensitivities(step, root), sensitivities(step, root, Estimate(step, root, 4))
    assert mixed.keys() == exact.keys()
    for name in ("first.weight", "scale"):
        assert mixed[name] == pytest.approx(exact[name], rel=1e-5)


def test_slices_are_equally_sensitive_and_consecutive() -> None:
    _, step = step_on("lenet:init=wide")
    sensitivity = sensitivities(step, root_set(8))
    where = equal_slices(step.params, sensitivity, 10)
    share = torch.zeros(10, dtype=torch.float64)
    for name, index in where.items():
        counts = torch.bincount(index.flatten().long(), minlength=10)
        share += counts * sensitivity[name] / index.numel()
    share /= share.sum()
    one_entry = max(sensitivity[name] / index.numel() for name, index in where.items()) / sum(sensitivity.values())
    assert (share - 0.1).abs().max() <= one_entry + 1e-9
    order = torch.cat([index.flatten() for index in where.values()]).long()
    assert (order.diff() >= 0).all()
    assert int(order[0]) == 0
    assert int(order[-1]) == 9


def test_without_any_sensitivity_slices_have_equal_sizes() -> None:
    where = equal_slices({"a": torch.zeros(30), "b": torch.zeros(7, 10)}, {"a": 0.0, "b": 0.0}, 10)
    counts = torch.bincount(torch.cat([index.flatten() for index in where.values()]).long())
    assert counts.tolist() == [10] * 10


def test_half_of_the_slices_get_noise_of_that_deviation_and_the_others_stay() -> None:
    gradient, step = step_on("lenet:init=wide")
    defense = GradDefense(sigma=0.3, images=8)
    run, where = defense.for_round(step), defense.slices_of(step)
    patterns = set()
    for seed in range(6):
        sent = run.on_gradient(gradient, replace(step, rng=Stream.seeded(seed)))
        noise = {name: (sent[name] - gradient[name]).flatten() for name in gradient}
        flat = torch.cat([*noise.values()])
        index = torch.cat([where[name].flatten() for name in gradient]).long()
        changed = [bool((flat[index == i] != 0).any()) for i in range(10)]
        assert sum(changed) == 5
        hit = torch.tensor(changed)[index]
        assert (flat[hit] != 0).float().mean() > 0.99
        assert flat[hit].std().item() == pytest.approx(0.3, rel=0.05)
        patterns.add(tuple(changed))
    assert len(patterns) > 1
    assert step.log.values("perturbed")[-1] == pytest.approx(float(hit.float().mean()))


def test_the_run_is_deterministic_and_prepares_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    counted = lambda *arguments: calls.append(1) or sensitivities(*arguments)  # noqa: E731
    monkeypatch.setattr(graddefense, "sensitivities", counted)
    client = SimulatedClient(
        models.build("lenet", SAMPLES.domain, seed=0),
        recipe=Recipe(sends="delta", epochs=3, batch_size=2),
        defense=DEFENSES.build("graddefense"),
    )
    first, second = (
        client.reply(client.model.params, SAMPLES.batch(range(4)), Stream.seeded(3)).update for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(calls) == 2


def test_examples_are_clipped_in_the_perturbed_slices_alone() -> None:
    _, step = step_on("lenet:init=wide", examples=3)
    gradient = step.gradient()
    defense = GradDefense(sigma=0.0, bound=0.01, images=8)
    run, where = defense.for_round(step), defense.slices_of(step)
    sent = run.on_gradient(gradient, replace(step, rng=Stream.seeded(1)))
    chosen = Stream.seeded(1).permutation(10)[:5].tolist()
    singles = [step.gradient(step.batch.take(slice(i, i + 1))) for i in range(3)]
    for single in singles:
        for part in chosen:
            squares = [g[where[name] == part].square().sum() for name, g in single.items()]
            factor = min(1.0, 0.01 / float(torch.stack(squares).sum().sqrt()))
            for name, g in single.items():
                g[where[name] == part] *= factor
    for name, g in gradient.items():
        inside = sum(where[name] == part for part in chosen).bool()
        expected = sum(single[name] for single in singles) / 3
        assert torch.allclose(sent[name][inside], expected[inside], rtol=1e-3, atol=1e-8)
        assert torch.equal(sent[name][~inside], g[~inside])


def test_labels_must_fit_the_model() -> None:
    small = nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))
    batch = SAMPLES.batch(range(2))
    _, step = step_of(small, Batch(batch.inputs, batch.labels % 4))
    with pytest.raises(GradveilError, match="public images have labels up to 9, but the model has 4 classes"):
        DEFENSES.build("graddefense").for_round(step)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("graddefense:sigma=-1", "sigma is at least 0"),
        ("graddefense:slices=0", "slices is from 1 to 255"),
        ("graddefense:perturbed=11", r"perturbed is from 0 to slices \(10\)"),
        ("graddefense:bound=0", "bound is none or above 0"),
        ("graddefense:images=0", "images is at least 1"),
        ("graddefense:images=1000", "needs 1000 public images"),
    ],
)
def test_impossible_options_are_refused(spec: str, message: str) -> None:
    _, step = step_on("lenet", examples=1)
    with pytest.raises(GradveilError, match=message):
        DEFENSES.build(spec).for_round(step)


@pytest.mark.parametrize("sigma", [float("nan"), float("inf")])
def test_a_sigma_that_is_not_finite_is_refused(sigma: float) -> None:
    with pytest.raises(GradveilError, match=f"sigma is at least 0, not {sigma}"):
        GradDefense(sigma=sigma)
