"""One number asked of every input, and values of it that part inputs into bins of equal share."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.types import Domain

Query = Literal["mean", "dct", "random"]
Quantiles = Literal["public", "normal", "laplace"]

NEIGHBORS = 0.93
"""Correlation of neighboring pixels that is assumed where there is no public data, as in CIFAR-10."""
_GRID = 4096
_TINY = 1e-6
"""Public images may all give the same answer."""


def direction(query: Query, domain: Domain, seed: int) -> Tensor:
    """[C, H, W]: the number asked of an input is its product with this.

    ``mean`` is the brightness; ``dct`` how much brighter the left side is than the right, the lowest cosine; ``random``
    a direction that is orthogonal to the brightness of every channel.
    """
    pixels = math.prod(domain.shape)
    if query == "mean":
        return torch.full(domain.shape, 1 / pixels)
    if query == "dct":
        wave = torch.cos(math.pi * (torch.arange(domain.width) + 0.5) / domain.width)
        return wave.expand(domain.shape) / pixels
    drawn = torch.randn(domain.shape, generator=generator(seed, "imprint query"))
    centered = drawn - drawn.mean(dim=(1, 2), keepdim=True)
    return torch.nn.functional.normalize(centered.flatten(), dim=0).view(domain.shape)


def edges(asked: Tensor, bins: int, quantiles: Quantiles, domain: Domain, public: Tensor | None) -> Tensor:
    """[bins + 1], rising: between two of them lies an equal share of inputs, and none in [0, 1] is outside.

    ``asked`` is a direction [C, H, W], ``public`` are inputs [n, C, H, W].
    """
    shares = torch.arange(1, bins, dtype=torch.float64) / bins
    if quantiles == "public":
        if public is None or len(public) < 2:
            raise GradveilError("attack 'imprint' needs public images for quantiles=public: or write quantiles=normal")
        inner = _blurred_quantiles((public.cpu() * asked).double().sum(dim=(1, 2, 3)), shares)
    else:
        center, spread = _assumed(asked.double(), domain)
        inner = center + spread * (torch.special.ndtri(shares) if quantiles == "normal" else _laplace(shares))
    least, greatest = asked.clamp(max=0).sum().double(), asked.clamp(min=0).sum().double()
    margin = (greatest - least) / bins  # bins beyond what an input can answer stay empty, but have a width
    first, last = torch.minimum(least, inner[0] - margin), torch.maximum(greatest, inner[-1] + margin)
    return torch.cat([first.view(1), inner, last.view(1)])


def _blurred_quantiles(values: Tensor, shares: Tensor) -> Tensor:
    """Quantiles of few values [n], each blurred by a Gaussian of Silverman's width: bins reach beyond those seen."""
    width = 1.06 * values.std().clamp(min=_TINY) * len(values) ** -0.2
    grid = torch.linspace(float(values.min() - 4 * width), float(values.max() + 4 * width), _GRID, dtype=values.dtype)
    below = torch.special.ndtr((grid[:, None] - values) / width).mean(dim=1)
    after = torch.searchsorted(below, shares).clamp(1, _GRID - 1)
    rest = (shares - below[after - 1]) / (below[after] - below[after - 1])
    return torch.lerp(grid[after - 1], grid[after], rest)


def _assumed(asked: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the answers, if pixels have the domain's and correlate less the farther apart.

    The correlation falls by the factor ``NEIGHBORS`` with every step across or down; channels rise and fall together.
    """
    mean, std = (torch.tensor(values, dtype=asked.dtype).view(-1, 1, 1) for values in (domain.mean, domain.std))
    down, across = (NEIGHBORS ** _distances(side).to(asked) for side in (domain.height, domain.width))
    together = (asked * std).sum(dim=0)
    return (asked * mean).sum(), (together * (down @ together @ across)).sum().sqrt()


def _distances(side: int) -> Tensor:
    places = torch.arange(side)
    return (places[:, None] - places).abs()


def _laplace(shares: Tensor) -> Tensor:
    """Quantiles of a Laplace distribution of variance 1."""
    return (shares - 0.5).sign() * -torch.log1p(-2 * (shares - 0.5).abs()) / math.sqrt(2)
