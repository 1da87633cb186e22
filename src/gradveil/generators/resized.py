"""A generator whose images are made smaller, as attacks do where the private images are smaller than the drawn ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.generators.base import Generator


class Resized(Generator):
    """Images of another generator as [C, size, size]: each pixel is the mean of the area that it covers."""

    def __init__(self, inner: Generator, size: int) -> None:
        super().__init__()
        channels, height, width = inner.shape
        if height != width or not 1 <= size <= height:
            raise GradveilError(
                f"generator: size is from 1 to the side of square images, not {size} of {height}x{width}"
            )
        self.inner = inner
        self.latent, self.classes, self.stages, self.card = inner.latent, inner.classes, inner.stages, inner.card
        self.shape = (channels, size, size)

    def stage(self, name: str, features: Tensor, wanted: Tensor | None) -> Tensor:
        out = self.inner.stage(name, features, wanted)
        return F.adaptive_avg_pool2d(out, self.shape[1:]) if name == self.stages[-1] else out

    def codes(self, count: int, rng: torch.Generator) -> Tensor:
        return self.inner.codes(count, rng)

    def carried(self, name: str) -> int:
        return self.inner.carried(name)


def resized(generator: Generator, size: int | None) -> Generator:
    """The generator itself where no size is asked for."""
    return generator if size is None else Resized(generator, size)
