"""A data set made of tensors that a program already holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.data.base import ImageSet


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorImages(ImageSet):
    """``inputs`` is floating point [n, C, H, W], in [0, 1]."""

    inputs: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inputs.is_floating_point() or self.inputs.ndim != 4:
            raise GradveilError(f"{self.name}: inputs must be floating point of shape [n, C, H, W]")
        if len(self.inputs) != len(self.labels):
            raise GradveilError(f"{self.name} has {len(self.inputs)} images but {len(self.labels)} labels")
        if self.inputs.numel() and not (self.inputs.min() >= 0 and self.inputs.max() <= 1):
            raise GradveilError(f"{self.name}: inputs are in [0, 1]; put the normalization into the model")

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.inputs.shape
        return (channels, height, width)

    def _inputs(self, indices: Tensor) -> Tensor:
        return self.inputs[indices]

    def _only(self, indices: Tensor) -> Self:
        return replace(self, inputs=self.inputs[indices], labels=self.labels[indices])
