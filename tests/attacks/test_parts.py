from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import grad_and_value, vmap

from exchanges import SAMPLES, observed, private_batches
from gradveil.attacks.parts.labels import infer_labels
from gradveil.attacks.parts.objectives import Cosine, Objective, Squared
from gradveil.attacks.parts.priors import Codes, Pixels
from gradveil.attacks.parts.search import Adam, Problems
from gradveil.client.local import local_update
from gradveil.core.progress import SILENT
from gradveil.core.seeding import generator
from gradveil.core.types import Params, Recipe, cross_entropy
from gradveil.generators import build
from gradveil.metrics import label_accuracy
from gradveil.models import Functional, classifier


def test_objectives_against_torch() -> None:
    rng = generator(0)
    a, b = ({"w": torch.randn(3, 4, generator=rng), "b": torch.randn(5, generator=rng)} for _ in range(2))
    flat_a, flat_b = (torch.cat([t["w"].flatten(), t["b"]]) for t in (a, b))
    torch.testing.assert_close(Cosine()(a, b), 1 - torch.nn.functional.cosine_similarity(flat_a, flat_b, dim=0))
    torch.testing.assert_close(Squared()(a, b), ((flat_a - flat_b) ** 2).sum() / (flat_b**2).sum())
    assert torch.isfinite(Cosine()(a, {k: torch.zeros_like(v) for k, v in b.items()}))


def test_costs_of_a_code_are_those_of_the_paper() -> None:
    """R1 is a KL divergence, which torch has; R2 the square of squared length less dimension."""
    codes = 1.5 * torch.randn(2, 128, generator=generator(3)) + 0.3
    normal = torch.distributions.Normal
    expected = {
        "kl": torch.distributions.kl_divergence(normal(codes.mean(dim=1), codes.std(dim=1)), normal(0.0, 1.0)).mean(),
        "norm": (codes.square().sum(dim=1) - 128).square().mean(),
    }
    for kind, value in expected.items():
        prior = Codes(build("mnist"), torch.device("cpu"), cost=kind, weight=0.5)  # type: ignore[arg-type]
        torch.testing.assert_close(prior.cost({"code": codes}), 0.5 * value, rtol=1e-4, atol=1e-4)


def test_the_slope_toward_a_long_update_that_is_nearly_reached_is_right() -> None:
    """Its parts along the two updates nearly cancel out: a length wrong by 1e-4 would be most of what is left."""
    rng = generator(2)
    observed = {"w": torch.randn(1, 3_000_000, generator=rng)}
    near = {"w": observed["w"] + 1e-3 * torch.randn(1, 3_000_000, generator=rng)}
    (slope, value), (exact, reference) = (
        Cosine().slopes(*({"w": tree["w"].to(dtype)} for tree in (near, observed)))
        for dtype in (torch.float32, torch.float64)
    )
    assert abs(value - reference) < 1e-6
    assert (slope["w"] - exact["w"]).norm() < 2e-3 * exact["w"].norm()


@pytest.mark.parametrize("objective", [Cosine(), Squared()], ids=["cosine", "squared"])
def test_slopes_of_many_problems_are_those_of_each(objective: Objective) -> None:
    rng = generator(1)
    a, b = ({"w": torch.randn(6, 3, 4, generator=rng), "b": torch.randn(6, 5, generator=rng)} for _ in range(2))
    slope, values = vmap(grad_and_value(objective))(a, b)
    found, distances = objective.slopes(a, b)
    torch.testing.assert_close(found, slope)
    torch.testing.assert_close(distances, values)


def test_pixels_stay_in_the_valid_range() -> None:
    prior = Pixels(SAMPLES.domain, "cpu")
    far = {"pixels": 100 * torch.randn(2, 3, 3, 32, 32, generator=generator(0))}
    inputs = prior.decode(prior.project(far), {})
    assert inputs.min() >= -1e-6
    assert inputs.max() <= 1 + 1e-6
    first, second = prior.starts(2, [generator(1), generator(1)])["pixels"]
    assert torch.equal(first, second), "a generator alone decides where its problem starts"


def quadratic(point: Params) -> tuple[Params, torch.Tensor]:
    """Two problems: one with its minimum at 3, one that falls for ever and then breaks."""
    x = point["x"]
    values = torch.stack([(x[0] - 3) ** 2, torch.where(x[1] > 0.5, torch.nan, -x[1])])
    return {"x": torch.stack([2 * (x[0] - 3), torch.tensor(-1.0)])}, values


def test_adam_is_torchs_adam() -> None:
    target = 5 + torch.randn(6, generator=generator(2))  # far off, so that the last point is the best one
    start = torch.zeros(1, 6)

    def evaluate(point: Params) -> tuple[Params, torch.Tensor]:
        difference = point["x"] - target
        return {"x": 2 * difference}, (difference**2).sum(dim=1)

    with SILENT.task("", None) as task:
        found = Adam(iterations=40, lr=0.05).run(Problems(evaluate, {"x": start}), task)
    reference = torch.zeros(1, 6, requires_grad=True)
    optimizer = torch.optim.Adam([reference], lr=0.05)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [15, 25, 35], gamma=0.1)
    for _ in range(40):
        optimizer.zero_grad()
        ((reference - target) ** 2).sum().backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(found.unknowns["x"], reference.detach(), atol=1e-5, rtol=1e-5)


def test_schedules() -> None:
    cosine = Adam(iterations=100, schedule="cosine", warmup=10)
    assert cosine.rate(0) == pytest.approx(0.1)
    assert cosine.rate(9) == cosine.rate(10) == 1
    assert cosine.rate(55) == pytest.approx(0.5)
    plateau = Adam(iterations=2500, schedule="plateau", warmup=125)
    assert [plateau.rate(i) for i in (0, 124, 1874)] == pytest.approx([1 / 125, 1, 1])
    assert [plateau.rate(1875 + i) for i in (0, 312, 624)] == pytest.approx([1, 0.5, 0], abs=2e-3)
    assert [Adam(iterations=8).rate(i) for i in (2, 3, 5, 7)] == pytest.approx([1, 0.1, 0.01, 0.001])


def test_langevin_noise_is_drawn_by_the_seed_of_each_problem() -> None:
    def evaluate(point: Params) -> tuple[Params, torch.Tensor]:
        return {"pixels": 2 * point["pixels"]}, point["pixels"].square().sum(dim=1)

    def searched(seeds: list[int], noise: float = 0.2) -> torch.Tensor:
        with SILENT.task("", None) as task:
            problems = Problems(evaluate, {"pixels": torch.ones(len(seeds), 3)}, seeds=seeds)
            return Adam(iterations=5, lr=0.1, noise=noise).run(problems, task).unknowns["pixels"]

    both = searched([1, 2])
    assert not torch.equal(both[0], both[1])
    assert torch.equal(searched([2])[0], both[1])
    assert torch.equal(searched([1], noise=0)[0], searched([2], noise=0)[0])


def test_a_diverged_problem_keeps_its_best_point_and_says_so() -> None:
    with SILENT.task("", None) as task:
        found = Adam(iterations=60, lr=0.1).run(Problems(quadratic, {"x": torch.zeros(2)}), task)
    assert found.stopped == ("budget", "diverged")
    assert torch.isfinite(found.objectives).all()
    assert found.unknowns["x"][1] <= 0.5
    assert found.steps[0] == 0
    assert found.steps[-1] == 60


@pytest.mark.parametrize("model", ["lenet", "lenet:init=wide", "convnet:width=8", "mlp", "vit:depth=1,dim=48"])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(sends="delta", lr=0.01)], ids=["gradient", "delta"])
def test_the_label_of_one_example_is_read_exactly(model: str, recipe: Recipe) -> None:
    batches = private_batches(30)
    labels = infer_labels(observed(batches, model=model, recipe=recipe), 1)
    assert labels.flatten().tolist() == [int(batch.labels) for batch in batches]


@pytest.mark.parametrize(("model", "always"), [("convnet:width=8", True), ("vit:depth=1,dim=48", False)])
def test_the_plain_sign_rule_needs_features_that_are_not_negative(model: str, always: bool) -> None:
    """One row of the last layer's gradient has no positive entry, and it is that of the label: so behind ReLUs."""
    batches = private_batches(30)
    seen = observed(batches, model=model)
    weight = f"{classifier(seen[0].module, seen[0].domain)}.weight"
    rows = torch.stack([one.reply[weight] for one in seen])
    negative = (rows <= 0).all(dim=2) & (rows < 0).any(dim=2)
    labels = torch.stack([batch.labels[0] for batch in batches])
    right = (negative.sum(dim=1) == 1) & negative.gather(1, labels[:, None])[:, 0]
    assert bool(right.all()) is always
    assert always or not right.any()


def test_the_label_survives_noise() -> None:
    """All but those of the one class that this untrained model is sure of: their gradient is too small to read."""
    batches = private_batches(20)
    labels = infer_labels(observed(batches, defense="noise:sigma=0.1"), 1).flatten()
    right = labels == torch.cat([batch.labels for batch in batches])
    assert right.sum() >= 18


@pytest.mark.integration
def test_labels_of_batches_with_repeats() -> None:
    rng = generator(0)
    batches = [SAMPLES.batch(torch.randint(100, (16,), generator=rng)) for _ in range(6)]
    labels = infer_labels(observed(batches, model="resnet18"), 16)
    right = [label_accuracy(labels[i], batch.labels) for i, batch in enumerate(batches)]
    assert sum(right) / len(right) >= 0.95


@pytest.mark.integration
def test_labels_after_local_steps_of_a_large_model() -> None:
    """Which there are; in which mini-batch each was, steps so small do not show."""
    batches = private_batches(3, 4)
    recipe = Recipe(sends="delta", lr=0.01, epochs=2, batch_size=2)
    labels = infer_labels(observed(batches, model="resnet18", recipe=recipe), 4)
    right = [label_accuracy(labels[i], batch.labels) for i, batch in enumerate(batches)]
    assert sum(right) / len(right) >= 0.9


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_labels_are_counted_in_steps_with_momentum(momentum: float) -> None:
    batches = [SAMPLES.batch(torch.randperm(100, generator=generator(i))[:16]) for i in range(2)]
    recipe = Recipe(sends="delta", epochs=5, lr=0.001, momentum=momentum)
    labels = infer_labels(observed(batches, model="lenet", recipe=recipe), 16)
    assert all(label_accuracy(labels[i], batch.labels) == 1 for i, batch in enumerate(batches))


def test_labels_are_tried_out_with_the_loss_that_clients_minimise() -> None:
    def tripled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 3 * cross_entropy(outputs, targets)

    recipe = Recipe(sends="delta", epochs=2, batch_size=2, lr=0.05)
    (batch,) = private_batches(1, 4)
    (one,) = observed([batch], model="lenet", recipe=recipe)
    reply = local_update(Functional(one.module), tripled, one.sent, batch.inputs, batch.labels, recipe)
    (labels,) = infer_labels([replace(one, reply=reply, loss=tripled)], 4)
    assert label_accuracy(labels, batch.labels) == 1


def test_granted_labels_are_taken() -> None:
    batches = private_batches(2, 3)
    seen = observed(batches, threat="C+labels", defense="noise:sigma=1000")
    assert torch.equal(infer_labels(seen, 3), torch.stack([batch.labels for batch in batches]))


@pytest.mark.parametrize("size", [1, 4])
def test_a_classifier_without_bias_gives_its_labels_away_too(size: int) -> None:
    batches = private_batches(5, size)
    seen = observed(batches, model="convnet:width=8")
    name = classifier(seen[0].module, seen[0].domain)
    blind = [{k: v for k, v in one.reply.items() if k != f"{name}.bias"} for one in seen]
    labels = infer_labels([type(o)(**{**o.__dict__, "reply": r}) for o, r in zip(seen, blind, strict=True)], size)
    right = [label_accuracy(labels[i], batch.labels) for i, batch in enumerate(batches)]
    assert sum(right) / len(right) >= 0.9
