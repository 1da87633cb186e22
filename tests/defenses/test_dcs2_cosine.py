"""Cosines of gradients come out the same whether examples share a pass or are differentiated alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exchanges import SAMPLES
from gradveil import models
from gradveil.core.streams import Stream
from gradveil.core.types import Batch
from gradveil.defenses import Step, dcs2
from gradveil.engine import why_not_shared
from gradveil.models import Functional
from steps import in_double, step_on

LARGE = "resnet18"


def with_slope(way: object, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cosines, outputs, the outputs at the targets, and a slope in the inputs, of two examples that go for others."""
    targets, others = step.batch.take(slice(0, 2)), step.batch.take(slice(2, 4))
    found, says = way(step, targets, others.labels)  # type: ignore[operator]
    inputs = others.inputs.clone().requires_grad_()
    cosines, said = found(inputs)
    (slope,) = torch.autograd.grad((torch.tensor([1.0, 3.0]) * cosines).sum() + said.square().sum(), inputs)
    return cosines.detach(), said.detach(), says.detach(), slope


def both_agree(step: Step) -> bool:
    exact = in_double(step)
    *pairs, slopes = zip(*(with_slope(way, exact) for way in (dcs2._shared, dcs2._each_alone)), strict=True)
    return all(same(one, other, 1e-9) for one, other in pairs) and same(*slopes, 1e-5)  # type: ignore[call-arg]


def same(one: Tensor, other: Tensor, share: float) -> bool:
    """Up to a share of the largest entry; under vmap torch's slopes of norms are right to 6e-6, in float64 too."""
    return bool((one - other).abs().max() <= share * other.abs().max())


@pytest.mark.integration
@pytest.mark.parametrize("model", [LARGE, "vit"])
def test_a_shared_pass_gives_what_each_alone_gives(model: str) -> None:
    assert both_agree(step_on(model)[1])


@pytest.mark.integration
def test_statistics_of_a_batch_are_those_of_one_example() -> None:
    module = models.build(LARGE, SAMPLES.domain, seed=0)
    _, step = step_on(LARGE)
    assert both_agree(replace(step, model=Functional(module, train_mode=True)))


@pytest.mark.integration
def test_frozen_layers_have_no_part_in_the_cosine() -> None:
    _, step = step_on(LARGE)
    frozen = {name: value for name, value in step.params.items() if name.startswith(("conv1", "bn1", "layer1"))}
    trained = {name: value for name, value in step.params.items() if name not in frozen}
    assert both_agree(replace(step, params=trained, frozen=frozen))


@pytest.mark.parametrize("model", ["lenet", "mlp"])
def test_small_models_are_differentiated_alone(model: str) -> None:
    _, step = step_on(model)
    assert "quicker" in why_not_shared(step)
    assert dcs2._shared(step, step.batch, step.batch.labels) is None
    found, says = dcs2.gradient_cosine(step, step.batch, step.batch.labels)
    cosines, said = found(step.batch.inputs)
    torch.testing.assert_close(cosines, torch.ones(len(step.batch)))
    torch.testing.assert_close(said, says)


@pytest.mark.integration
def test_half_a_layer_frozen_and_draws_of_a_batch_are_left_to_the_slow_way() -> None:
    _, step = step_on(LARGE)
    half = replace(step, params={n: v for n, v in step.params.items() if n != "fc.bias"},
                   frozen={"fc.bias": step.params["fc.bias"]})  # fmt: skip
    moved = step.model.with_buffers({name: value + 1 for name, value in step.model.buffers.items()})
    for odd in (half, replace(step, model=moved)):
        assert why_not_shared(odd)
        assert dcs2._shared(odd, Batch(step.batch.inputs[:1], step.batch.labels[:1]), step.batch.labels[:1]) is None
        cosines, _ = dcs2.gradient_cosine(odd, step.batch, step.batch.labels)[0](step.batch.inputs)
        torch.testing.assert_close(cosines, torch.ones(len(step.batch)))


def test_a_gradient_of_zero_has_a_finite_slope() -> None:
    _, step = step_on("lenet")
    still = replace(step, loss=lambda outputs, _labels: outputs.sum() * 0, rng=Stream.seeded(0, "defense"))
    inputs = step.batch.inputs.clone().requires_grad_()
    cosines, _ = dcs2.gradient_cosine(still, step.batch, step.batch.labels)[0](inputs)
    (slope,) = torch.autograd.grad(cosines.sum(), inputs)
    assert cosines.eq(0).all()
    assert slope.isfinite().all()
