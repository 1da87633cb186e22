"""The face of every data set: labels at hand, pictures on demand as a Batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch, Domain

Indices = Sequence[int] | Tensor
"""Positions in a data set, each from 0 to its length minus 1, in any order, repeats allowed."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSet(ABC):
    """Labelled images of one shape. Subclasses say where the pixels come from.

    ``labels`` is int64 [n], ``class_names`` names each label, ``mean`` and ``std`` are per channel of inputs in [0, 1].
    """

    name: str
    labels: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.labels.ndim != 1 or self.labels.dtype != torch.int64:
            raise GradveilError(f"{self.name}: labels must be int64 of shape [n]")
        outside = self.labels[(self.labels < 0) | (self.labels >= len(self.class_names))]
        if len(outside):
            raise GradveilError(
                f"{self.name}: label {int(outside[0])} is out of range; there are {len(self.class_names)} classes"
            )

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of every image."""

    @abstractmethod
    def _inputs(self, indices: Tensor) -> Tensor:
        """The images at checked indices, float32 [n, C, H, W] in [0, 1]."""

    @abstractmethod
    def _only(self, indices: Tensor) -> Self:
        """The set of the images at checked indices."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def domain(self) -> Domain:
        return Domain(*self.shape, classes=len(self.class_names), mean=self.mean, std=self.std)

    def batch(self, indices: Indices) -> Batch:
        """The chosen images and labels: inputs float32 [n, C, H, W] in [0, 1], labels [n]."""
        checked = self._checked(indices)
        return Batch(self._inputs(checked), self.labels[checked])

    def subset(self, indices: Indices) -> Self:
        """A smaller set of the same kind, in the order of ``indices``."""
        return self._only(self._checked(indices))

    def to(self, device: str) -> Self:  # noqa: ARG002
        """The same set with its pixels on a device, where that saves moving them with every batch."""
        return self

    def _checked(self, indices: Indices) -> Tensor:
        chosen = torch.as_tensor(indices).cpu()
        if chosen.numel() == 0:
            return torch.empty(0, dtype=torch.int64)
        if chosen.ndim != 1 or chosen.dtype == torch.bool or chosen.is_floating_point():
            raise GradveilError(f"{self.name}: indices must be a flat list of whole numbers")
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(outside):
            raise GradveilError(f"{self.name} has {len(self)} images, numbered from 0: there is no {int(outside[0])}")
        return chosen.long()
