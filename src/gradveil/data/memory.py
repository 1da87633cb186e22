"""A data set held in memory, one byte per channel and pixel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.data.base import ImageSet


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryImages(ImageSet):
    """``images`` is uint8 [n, C, H, W].

    >>> two = MemoryImages(
    ...     name="two greys", images=torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1),
    ...     labels=torch.tensor([0, 1]), class_names=("dark", "light"), mean=(0.5,), std=(0.5,))
    >>> two.batch([1, 0]).inputs.flatten()
    tensor([1., 0.])
    """

    images: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise GradveilError(f"{self.name}: images must be uint8 of shape [n, C, H, W]")
        if len(self.images) != len(self.labels):
            raise GradveilError(f"{self.name} has {len(self.images)} images but {len(self.labels)} labels")

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.images.shape
        return (channels, height, width)

    def _inputs(self, indices: Tensor) -> Tensor:
        return self.images[indices.to(self.images.device)].float() / 255

    def to(self, device: str) -> Self:
        return replace(self, images=self.images.to(device))

    def _only(self, indices: Tensor) -> Self:
        return replace(self, images=self.images[indices.to(self.images.device)], labels=self.labels[indices])
