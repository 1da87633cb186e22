"""All metrics together: what is there, what is absent, and what a guess that is no picture gets."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.metrics import FAILED, LPIPS, METRICS, mse, psnr, score, ssim

PRIVATE = torch.tensor([3, 30, 7])


class PixelDistance(LPIPS):
    """Stands where LPIPS stands, without its weights: the mean squared error, doubled so as to be told apart."""

    def __init__(self) -> None:
        self.net = "vgg"

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        return 2 * mse(a, b)

    def pairwise(self, a: Tensor, b: Tensor) -> Tensor:
        return 2 * torch.cdist(a.flatten(1), b.flatten(1)).square() / a[0].numel()


@pytest.fixture(scope="module")
def gallery() -> Batch:
    return load("cifar10-samples").batch(range(40))


@pytest.fixture
def truth(gallery: Batch) -> Batch:
    return gallery.take(PRIVATE)


def noisy(batch: Batch) -> Batch:
    noise = 0.02 * torch.randn(batch.inputs.shape, generator=torch.Generator().manual_seed(0))
    return Batch(batch.inputs + noise, batch.labels)


def scored(truth: Batch, guess: Batch, gallery: Batch, **options: Any) -> Any:
    settings = {"truth_index": PRIVATE, "lpips": PixelDistance(), "representation": None, **options}
    return score(truth, guess, gallery=gallery.inputs, **settings)


def test_good_guesses(truth: Batch, gallery: Batch) -> None:
    guess = Batch(noisy(truth).inputs, torch.tensor([3, 9, 7]))

    def represent(images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))

    scores = scored(truth, guess, gallery, representation=represent)
    found = scores.per_image
    clipped = guess.inputs.clamp(0, 1)
    torch.testing.assert_close(found["mse"], mse(clipped, truth.inputs))
    torch.testing.assert_close(found["psnr"], psnr(clipped, truth.inputs))
    torch.testing.assert_close(found["ssim"], ssim(clipped, truth.inputs))
    torch.testing.assert_close(found["lpips"], 2 * found["mse"])
    torch.testing.assert_close(found["mse_r"], (represent(clipped) - represent(truth.inputs)).square().mean(dim=1))
    assert found["rank"].tolist() == [1, 1, 1]
    assert found["identified"].tolist() == [True, True, True]
    assert found["label_correct"].tolist() == [True, False, True]
    assert scores.identified_by == "lpips"
    assert set(found) <= set(METRICS)
    assert scores.means()["identified"] == 1
    assert scores.means()["label_correct"] == pytest.approx(2 / 3)


def test_a_picture_of_somebody_else_is_not_identified(truth: Batch, gallery: Batch) -> None:
    somebody = gallery.take(torch.tensor([4, 5, 6]))
    found = scored(truth, somebody, gallery).per_image
    assert (found["rank"] > 1).all()
    assert not found["identified"].any()


def test_without_lpips_candidates_are_ranked_by_ssim(truth: Batch, gallery: Batch) -> None:
    scores = scored(truth, noisy(truth), gallery, lpips=None)
    assert scores.identified_by == "ssim"
    assert "lpips" not in scores.per_image
    assert "mse_r" not in scores.per_image
    assert scores.per_image["identified"].all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("lpips", [PixelDistance(), None], ids=["lpips", "ssim"])
def test_what_is_no_picture_scores_worst(truth: Batch, gallery: Batch, value: float, lpips: LPIPS | None) -> None:
    guess = noisy(truth)
    guess.inputs[1, 0, 5, 5] = value
    scores = scored(truth, guess, gallery, lpips=lpips, representation=lambda images: 1 + images.flatten(1))
    found = scores.per_image
    assert {name: float(found[name][1]) for name in FAILED if name in found} == {
        n: FAILED[n] for n in FAILED if n in found
    }
    assert found["rank"].tolist() == [1, 40, 1]
    assert found["identified"].tolist() == [True, False, True]
    assert float(found["mse_r"][1]) == pytest.approx(float((1 + truth.inputs[1]).square().mean()))
    json.dumps(scores.means(), allow_nan=False)


def test_pixels_far_outside_stay_finite(truth: Batch, gallery: Batch) -> None:
    means = scored(truth, Batch(truth.inputs + 1e38, truth.labels), gallery).means()
    assert all(math.isfinite(value) for value in means.values())


def test_mistakes_of_the_caller_are_refused(truth: Batch, gallery: Batch) -> None:
    with pytest.raises(GradveilError, match="does not point"):
        scored(truth, truth, gallery, truth_index=PRIVATE + 1)
    with pytest.raises(GradveilError, match="shape of the truth"):
        scored(truth, truth.take(slice(0, 2)), gallery)
    with pytest.raises(GradveilError, match="distractor"):
        scored(truth.take(slice(0, 1)), truth.take(slice(0, 1)), truth.take(slice(0, 1)), truth_index=torch.tensor([0]))
    with pytest.raises(GradveilError, match="not finite"):
        scored(truth, truth, gallery, representation=lambda images: images.flatten(1) / 0)
