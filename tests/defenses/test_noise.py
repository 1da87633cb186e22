from __future__ import annotations

import numpy as np
import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.types import Params
from gradveil.defenses import DEFENSES
from gradveil.defenses.noise import Noise
from steps import step_on


def defended(spec: str, gradient: Params, seed: int = 0) -> Params:
    return DEFENSES.build(spec).on_gradient(gradient, step_on(examples=1, seed=seed)[1])


@pytest.mark.parametrize(("kind", "kurtosis"), [("gaussian", 3.0), ("laplace", 6.0)])
def test_noise_has_its_deviation_and_its_shape(kind: str, kurtosis: float) -> None:
    zero = {"w": torch.zeros(400, 500)}
    drawn = defended(f"noise:sigma=0.3,kind={kind}", zero)["w"].double()
    assert drawn.mean().abs() < 0.003
    assert drawn.std().item() == pytest.approx(0.3, rel=0.01)
    assert ((drawn / drawn.std()) ** 4).mean().item() == pytest.approx(kurtosis, rel=0.05)
    assert torch.equal(zero["w"], torch.zeros(400, 500))


@pytest.mark.parametrize(
    ("kind", "unit", "deviation"),
    [("gaussian", "variance", 0.1**0.5), ("gaussian", "scale", 0.1), ("laplace", "variance", 0.1**0.5)],
)
def test_sigma_is_of_the_unit_that_is_named(kind: str, unit: str, deviation: float) -> None:
    drawn = defended(f"noise:sigma=0.1,kind={kind},unit={unit}", {"w": torch.zeros(400, 500)})["w"].double()
    assert drawn.std().item() == pytest.approx(deviation, rel=0.01)


def test_the_scale_of_laplace_noise_is_that_of_numpys_generator() -> None:
    """Its mean distance from zero is the scale, its deviation the root of 2 times that."""
    drawn = defended("noise:sigma=0.1,kind=laplace,unit=scale", {"w": torch.zeros(400, 500)})["w"].double()
    theirs = np.random.default_rng(0).laplace(0, 0.1, 200_000)
    assert drawn.abs().mean().item() == pytest.approx(np.abs(theirs).mean(), rel=0.01)
    assert drawn.std().item() == pytest.approx(2**0.5 * 0.1, rel=0.01)


def test_tensors_do_not_share_their_noise() -> None:
    drawn = defended("noise", {"a": torch.zeros(1000), "b": torch.zeros(1000)})
    assert torch.corrcoef(torch.stack([drawn["a"], drawn["b"]]))[0, 1].abs() < 0.15


def test_none_changes_nothing() -> None:
    gradient = {"w": torch.randn(5, generator=generator(1))}
    assert torch.equal(defended("none", gradient)["w"], gradient["w"])


def test_a_negative_sigma_is_refused() -> None:
    with pytest.raises(GradveilError, match="at least 0"):
        DEFENSES.build("noise:sigma=-1")


@pytest.mark.parametrize("sigma", [float("nan"), float("inf")])
def test_a_sigma_that_is_not_finite_is_refused(sigma: float) -> None:
    with pytest.raises(GradveilError, match=f"sigma is at least 0, not {sigma}"):
        Noise(sigma=sigma)
