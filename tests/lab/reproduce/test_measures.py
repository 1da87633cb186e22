"""What is neither an audit nor a training: costs, rounds of a training, and landscapes of the objective."""

from __future__ import annotations

import pytest
import torch

from gradveil.core.seeding import generator
from gradveil.generators import build
from gradveil.lab.reproduce.landscape import _minima, _slice, _span, add_lpips, inversion, landscape
from gradveil.lab.reproduce.measures import (
    _leakage_by_round,
    censor_fallbacks,
    concealed_sample,
    leakage_in_round,
    step_overhead,
)


def surface(defense: str, *, aware: bool) -> dict[str, object]:
    return landscape(
        {
            "data": "mnist-samples", "model": "lenet:init=wide", "defense": defense, "aware": aware, "points": 3,
            "images": 1, "steps": 40, "seed": 0, "device": "cpu",
        }
    )  # fmt: skip


def test_the_slice_has_the_code_of_the_private_picture_in_its_middle_and_two_directions() -> None:
    draws = build("mnist")
    center = torch.randn(draws.latent, generator=generator(1))
    codes = _slice(_span(draws, center, generator(0)), 3)
    assert codes.shape == (9, draws.latent)
    assert torch.allclose(codes[4], center, atol=1e-5)
    assert int(torch.linalg.matrix_rank(codes - center, tol=1e-3)) == 2


def test_a_local_minimum_is_lower_than_all_its_neighbours_and_the_edge_has_none() -> None:
    surface = torch.ones(5, 6)
    surface[1, 1] = surface[3, 4] = 0.0
    surface[0, 5] = -1.0
    assert _minima(surface) == 2
    surface[2, 2] = 0.0  # beside the first: neither is lower than the other
    assert _minima(surface) == 1


@pytest.mark.integration
def test_an_adversary_that_adapts_sees_the_private_picture_lower_under_sparsification() -> None:
    plain, adapted = (surface("sparsify:rate=0.9", aware=aware) for aware in (False, True))
    assert adapted["at_private"] < plain["at_private"]  # type: ignore[operator]
    assert -1 <= plain["with_mse"] <= 1  # type: ignore[operator]
    assert torch.tensor(plain["surface"]).shape == (3, 3)
    assert torch.tensor(plain["surface"])[1, 1] == pytest.approx(plain["at_private"])


@pytest.mark.integration
def test_without_a_defense_nothing_is_lower_than_the_private_picture() -> None:
    found = surface("none", aware=False)
    assert found["lowest"] == found["at_private"]
    assert found["mse_at_lowest"] == found["mse_at_private"]
    assert found["lowest_is_private"] == 1
    assert found["with_undefended"] == pytest.approx(1.0), "it is that objective"


@pytest.mark.integration
def test_lpips_is_added_later_to_figures_of_a_machine_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        "data": "mnist-samples", "model": "lenet:init=wide", "defense": "none", "aware": False, "points": 3,
        "images": 2, "steps": 5, "seed": 0, "device": "cpu",
    }  # fmt: skip
    monkeypatch.setattr("gradveil.lab.reproduce.landscape._lpips", lambda _pictures, _truth: None)
    without = landscape(fields)
    assert without["with_lpips"] is without["least_lpips"] is None
    monkeypatch.setattr(
        "gradveil.lab.reproduce.landscape._lpips",
        lambda pictures, truth: (pictures - truth).square().mean(dim=(1, 2, 3)),
    )
    found = add_lpips(fields, without)
    assert found["with_lpips"] == pytest.approx(without["with_mse"]), "the stand-in for LPIPS is the MSE"
    assert found["lpips_at_lowest"] == pytest.approx(without["mse_at_lowest"], rel=1e-4)
    assert found["surface"] == without["surface"]


@pytest.mark.integration
def test_the_inversion_is_nearer_than_what_ggl_finds_and_ggl_has_the_lower_objective() -> None:
    found = inversion({
        "data": "mnist-samples", "model": "lenet:init=wide", "defense": "none", "images": 1, "steps": 150, "seed": 0,
        "attack": "ggl:optimizer=adam,iterations=60,restarts=1", "device": "cpu",
    })  # fmt: skip
    assert found["inverted_psnr"] > found["ggl_psnr"]
    assert 0 <= found["lowest_objective_at"] <= 1
    assert found["highest_psnr_at"] > 0.5
    assert found["each"][0]["ggl_psnr"] == found["ggl_psnr"]


def test_a_concealed_sample_is_timed_and_its_memory_is_not_known_on_a_cpu() -> None:
    fields = {"data": "mnist-samples", "model": "lenet", "seed": 0, "device": "cpu"}
    found = concealed_sample({**fields, "defense": "dcs2:iterations=20,sensitive=first"})
    assert found["megabytes"] is None
    assert isinstance(found["seconds"], float)  # how much it is depends on what else the machine does


def test_fallbacks_of_censor_depend_on_initialisation_and_projection() -> None:
    fields = {"data": "cifar10-samples", "model": "lenet", "lr": 0.1, "images": 3, "seed": 0, "device": "cpu"}
    plain = censor_fallbacks({**fields, "init": "default", "projection": "exact"})
    wide = censor_fallbacks({**fields, "init": "wide", "projection": "exact"})
    released = censor_fallbacks({**fields, "init": "default", "projection": "released", "lr": 1e-4})
    assert (plain["fallback_rate"], wide["fallback_rate"], released["fallback_rate"]) == (1.0, 0.0, 0.0)
    assert plain["cosine"] == pytest.approx(1.0), "the gradient itself"
    assert wide["cosine"] == pytest.approx(0.0, abs=1e-5)
    assert released["cosine"] > 0.1, "the released projection leaves a part of the gradient"  # type: ignore[operator]
    assert plain["steps"] == 3


@pytest.mark.integration
def test_what_twenty_trials_add_to_a_step_is_timed() -> None:
    found = step_overhead({"model": "mlp", "batch_size": 8, "device": "cpu", "defense": "censor", "seed": 0})
    assert isinstance(found["percent"], float)


@pytest.mark.integration
def test_all_rounds_come_of_one_training() -> None:
    fields = {
        "data": "mnist-samples", "model": "mlp", "clients": 3, "rounds": 2, "algorithm": "fedsgd", "batch_size": 1,
        "defense": "none", "tapped": 2, "attack": "ig:iterations=2", "seed": 0, "device": "cpu",
    }  # fmt: skip
    before = _leakage_by_round.cache_info().misses
    rounds = [leakage_in_round({**fields, "round": number}) for number in (1, 2)]
    assert _leakage_by_round.cache_info().misses == before + 1
    assert rounds[0]["psnr"] != rounds[1]["psnr"]
    assert all(found["ssim"] is not None for found in rounds)
