"""Metrics on pixels. Each takes two sets of images [n, C, H, W] in [0, 1] and gives one number per pair, [n]."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from gradveil.core.errors import GradveilError

PSNR_CAP = 100.0
"""PSNR in dB of two equal images, which would be infinite: a bound keeps means finite."""

SSIM_WINDOW = 11
_PAIR_PIXELS = 2**21


def mse(guess: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error, [n]. Lower leaks more.

    >>> mse(torch.full((1, 3, 8, 8), 0.5), torch.zeros(1, 3, 8, 8))
    tensor([0.2500])
    """
    return (guess - truth).square().flatten(1).mean(dim=1)


def psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, at most ``PSNR_CAP``, [n]. Higher leaks more.

    >>> psnr(torch.full((1, 3, 8, 8), 0.1), torch.zeros(1, 3, 8, 8))
    tensor([20.])
    """
    return peak_signal_noise_ratio(guess, truth, data_range=1.0, reduction="none", dim=(1, 2, 3)).clamp(max=PSNR_CAP)


def ssim(guess: Tensor, truth: Tensor) -> Tensor:
    """Structural similarity with a Gaussian window of sigma 1.5, [n] in [-1, 1]. Higher leaks more.

    >>> ssim(torch.eye(16).expand(1, 3, 16, 16), torch.eye(16).flip(0).expand(1, 3, 16, 16))
    tensor([-0.0883])
    """
    if min(guess.shape[-2:]) < SSIM_WINDOW:
        size = f"{guess.shape[-2]}x{guess.shape[-1]}"
        raise GradveilError(
            f"SSIM looks through a window of {SSIM_WINDOW}x{SSIM_WINDOW}: images of {size} are too small"
        )
    measured = structural_similarity_index_measure(
        guess, truth, data_range=1.0, sigma=1.5, reduction="none", return_full_image=True
    )
    # Whole windows only, as Wang et al. (2004) and scikit-image do. torchmetrics' own mean includes windows that look
    # beyond the border, which on a noisy 28x28 digit made 0.35 of 0.69.
    margin = SSIM_WINDOW // 2
    return measured[1][..., margin:-margin, margin:-margin].flatten(1).mean(dim=1)


def ssim_pairwise(guesses: Tensor, candidates: Tensor) -> Tensor:
    """The structural similarity of each guess [n, C, H, W] with each candidate [m, C, H, W]: [n, m]."""
    at_once = max(1, _PAIR_PIXELS // guesses[0].numel())
    left, right = torch.cartesian_prod(torch.arange(len(guesses)), torch.arange(len(candidates))).unbind(1)
    rows = [
        ssim(guesses[i], candidates[j])
        for i, j in zip(torch.split(left, at_once), torch.split(right, at_once), strict=True)
    ]
    return torch.cat(rows).view(len(guesses), len(candidates))
