"""Pixel metrics against scikit-image, on random and on real pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from skimage import data
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.metrics import PSNR_CAP, mse, psnr, ssim, ssim_pairwise


def noisy(images: Tensor, sigma: float) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + sigma * noise).clamp(0, 1)


def picture(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).float().permute(2, 0, 1)[None] / 255


def pairs() -> dict[str, tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    astronaut, coffee = picture(data.astronaut()), picture(data.coffee())
    cifar, mnist = load("cifar10-samples").batch(range(8)).inputs, load("mnist-samples").batch(range(8)).inputs
    return {
        "random": (torch.rand(4, 3, 32, 32, generator=rng), torch.rand(4, 3, 32, 32, generator=rng)),
        "astronaut": (noisy(astronaut, 0.1), astronaut),
        "crops": (astronaut[..., :200, :300], coffee[..., :200, :300]),
        "cifar": (noisy(cifar, 0.05), cifar),
        "shifted": (cifar.roll(1, dims=0), cifar),
        "mnist": (noisy(mnist, 0.3), mnist),
    }


@pytest.mark.parametrize("kind", pairs())
def test_agrees_with_scikit_image(kind: str) -> None:
    guess, truth = pairs()[kind]
    assert mse(guess, truth).shape == psnr(guess, truth).shape == ssim(guess, truth).shape == (len(truth),)
    for index, (a, b) in enumerate(zip(guess.double().numpy(), truth.double().numpy(), strict=True)):
        similarity = structural_similarity(
            a, b, data_range=1.0, channel_axis=0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        assert float(mse(guess, truth)[index]) == pytest.approx(np.mean((a - b) ** 2), rel=1e-5)
        assert float(psnr(guess, truth)[index]) == pytest.approx(
            peak_signal_noise_ratio(b, a, data_range=1.0), abs=1e-4
        )
        assert float(ssim(guess, truth)[index]) == pytest.approx(similarity, abs=5e-4)


def test_equal_images() -> None:
    images = torch.rand(2, 3, 28, 28)
    assert mse(images, images).tolist() == [0, 0]
    assert psnr(images, images).tolist() == [PSNR_CAP, PSNR_CAP]
    assert ssim(images, images).tolist() == pytest.approx([1, 1])


def test_one_image_still_gives_a_list() -> None:
    assert ssim(torch.rand(1, 1, 16, 16), torch.rand(1, 1, 16, 16)).shape == (1,)


def test_pairwise_equals_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.metrics.pixel._PAIR_PIXELS", 4 * 16 * 16)  # chunks that end inside a row
    guesses, candidates = torch.rand(3, 1, 16, 16), torch.rand(5, 1, 16, 16)
    together = ssim_pairwise(guesses, candidates)
    for row, guess in zip(together, guesses, strict=True):
        torch.testing.assert_close(row, ssim(guess.expand(5, -1, -1, -1), candidates))


def test_images_smaller_than_the_window_are_refused() -> None:
    with pytest.raises(GradveilError, match="8x8 are too small"):
        ssim(torch.rand(1, 1, 8, 8), torch.rand(1, 1, 8, 8))
