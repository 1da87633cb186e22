"""The scattering transform (Bruna and Mallat 2013): features that need no weights, only wavelets.

What a picture's wavelet coefficients are in size, smoothed; and the same once more of these sizes. Oyallon and Mallat
(2015) classify CIFAR-10 with it, Tramer and Boneh (2021) train on it with differential privacy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE = 32
"""Pictures are brought to this size."""
SCALES, ANGLES, MARGIN = 2, 8, 8


def _wave(scale: float, frequency: float, angle: float, slant: float) -> Tensor:
    """[side, side], complex: a Gabor function around the origin of a torus."""
    side = SIDE + 2 * MARGIN
    line = torch.arange(side, dtype=torch.float64)
    line = torch.where(line < side / 2, line, line - side)
    down, across = torch.meshgrid(line, line, indexing="ij")
    along = math.cos(angle) * across + math.sin(angle) * down
    aside = math.cos(angle) * down - math.sin(angle) * across
    envelope = torch.exp(-(along**2 + (slant * aside) ** 2) / (2 * scale**2)) * slant / (2 * math.pi * scale**2)
    return torch.polar(envelope, frequency * along)


class Scattering(nn.Module):
    """Pictures [n, C, 32, 32] in [0, 1] to [n, C * 81 * 64]: two orders, two scales, eight angles."""

    smooth: Tensor
    waves: Tensor

    def __init__(self) -> None:
        super().__init__()
        low = _wave(0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0)
        found = []
        for scale in range(SCALES):
            for number in range(ANGLES):
                width, turned, slant = 0.8 * 2**scale, number * math.pi / ANGLES, 4 / ANGLES
                wave = _wave(width, 3 * math.pi / 4 / 2**scale, turned, slant)
                bump = _wave(width, 0.0, turned, slant)
                found.append(wave - bump * (wave.sum() / bump.sum()))  # Morlet: blind to the mean
        for name, filters in (("smooth", low), ("waves", torch.stack(found))):
            self.register_buffer(name, torch.fft.fft2(filters).to(torch.complex64), persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        spectrum = torch.fft.fft2(F.pad(pictures, (MARGIN, MARGIN, MARGIN, MARGIN), mode="reflect"))[..., None, :, :]
        fine = torch.fft.fft2(torch.fft.ifft2(spectrum * self.waves[:ANGLES]).abs())
        # What the wider waves leave has no fine detail: every second position tells it.
        coarse = torch.fft.fft2(torch.fft.ifft2(_folded(spectrum * self.waves[ANGLES:], 2)).abs())
        both = _folded(fine[..., None, :, :] * self.waves[ANGLES:], 2)
        second = torch.fft.fft2(torch.fft.ifft2(both).abs()).flatten(-4, -3)
        found = [_folded(each * self.smooth, 4) for each in (spectrum, fine)]
        found += [_folded(each * _folded(self.smooth, 2) * 4, 2) for each in (coarse, second)]
        # A picture ends two of these positions away from the margin's end.
        kept = slice(MARGIN // 4, -MARGIN // 4)
        mean: Tensor = torch.fft.ifft2(torch.cat(found, dim=-3)).real
        return mean[..., kept, kept].flatten(1)


def _folded(spectrum: Tensor, step: int) -> Tensor:
    """The spectrum of every ``step``-th row and column."""
    *others, height, width = spectrum.shape
    return spectrum.reshape(*others, step, height // step, step, width // step).mean(dim=(-4, -2))
