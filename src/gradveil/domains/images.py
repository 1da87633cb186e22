"""Images [n, C, H, W] in [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gradveil.core.errors import GradveilError
from gradveil.core.fields import shown
from gradveil.core.types import is_number
from gradveil.domains.base import Domain
from gradveil.domains.pictures import Encoding, as_pixels

GRAY = 0.5
NEIGHBORS = 0.93
"""Correlation of neighboring pixels that is assumed where there are no public images, as in CIFAR-10."""
_COARSE = 4
_FINE = 0.3
"""Stand-ins are this many random values a side, blown up, and so much noise of each pixel."""


@dataclass(frozen=True)
class Images(Domain):
    """Images of one size; ``mean`` and ``std`` per channel say how a model may normalise them.

    >>> digits = Images(channels=1, height=28, width=28, classes=10, mean=(0.13,), std=(0.31,))
    >>> digits.shape, digits.fault(torch.zeros(2, 1, 28, 28)), digits.fault(torch.zeros(2, 3, 28, 28))
    ((1, 28, 28), None, 'inputs of shape (2, 3, 28, 28)')
    """

    kind: ClassVar[str] = "images"

    channels: int
    height: int
    width: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, limit in (("channels", 64), ("height", 8192), ("width", 8192), ("classes", 2**20)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise GradveilError(f"{name} of the inputs is a whole number from 1 to {limit}, not {shown(value)}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            good = isinstance(values, tuple) and len(values) == self.channels
            if not good or not all(map(is_number, values)):
                raise GradveilError(
                    f"{name} of the inputs is one number for each of the {self.channels} channels, none too large"
                )
        if min(self.std) <= 0:
            raise GradveilError("std of the inputs is above 0 in every channel")

    @classmethod
    def like(cls, inputs: Tensor, classes: int) -> Self:
        """The domain of images of which nothing is known but their shape: a model gets them as they are."""
        if inputs.dim() != 4:
            raise GradveilError(f"images are [n, C, H, W], not {list(inputs.shape)}")
        channels, height, width = inputs.shape[1:]
        return cls(channels, height, width, classes, mean=(0.0,) * channels, std=(1.0,) * channels)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.height, self.width)

    def moments(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(each, device=device, dtype=dtype).view(-1, 1, 1) for each in (self.mean, self.std))
        return mean, std

    def probes(self, count: int, rng: torch.Generator) -> Tensor:
        mean, std = self.moments()
        return (mean + std * torch.randn((count, *self.shape), generator=rng)).clamp(0, 1)

    def stand_ins(self, count: int, rng: torch.Generator) -> Tensor:
        coarse = torch.randn(count, self.channels, _COARSE, _COARSE, generator=rng)
        smooth = interpolate(coarse, size=self.shape[1:], mode="bilinear", align_corners=False)
        fine = torch.randn(count, *self.shape, generator=rng)
        mean, std = self.moments()
        return (mean + std * (smooth + _FINE * fine)).clamp(0, 1)

    def spread_along(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """As in the base. The correlation of two pixels falls by the factor ``NEIGHBORS`` with every step across or
        down; channels rise and fall together.
        """
        mean, std = self.moments(dtype=direction.dtype)
        places = [torch.arange(side) for side in (self.height, self.width)]
        down, across = (NEIGHBORS ** (place[:, None] - place).abs().to(direction) for place in places)
        together = (direction * std).sum(dim=0)
        return (direction * mean).sum(), (together * (down @ together @ across)).sum().sqrt()

    def roughness(self, inputs: Tensor) -> Tensor:
        return total_variation(inputs)

    def energy(self, inputs: Tensor) -> Tensor:
        """Squared length of the image around mid-gray (GradInversion's image norm)."""
        return (inputs - GRAY).square().sum()

    def blank(self, count: int) -> Tensor:
        return torch.full((count, *self.shape), GRAY)

    def valid(self, inputs: Tensor) -> Tensor:
        return inputs.nan_to_num(GRAY).clamp(0, 1)

    def fault(self, inputs: Tensor) -> str | None:
        if inputs.shape != (len(inputs), *self.shape):
            return f"inputs of shape {tuple(inputs.shape)}"
        outside = not bool(torch.isfinite(inputs).all()) or inputs.min() < 0 or inputs.max() > 1
        return "pixels outside [0, 1]" if outside else None

    def show(self, inputs: Tensor) -> bytes:
        """Images of other than one or three channels are shown by their first."""
        strip = torch.cat(list(inputs if self.channels == 3 else inputs[:, :1]), dim=2)
        return Encoding().png(as_pixels(strip[None].detach().cpu().numpy())[0])


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbors, across plus down."""
    across = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    return across + down
