"""A user's own map-style torch Dataset with the face of an ImageSet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.data.base import ImageSet


class MapStyle(Protocol):
    """What ``torch.utils.data.Dataset`` promises: a length, and (image, label) by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def from_dataset(
    dataset: MapStyle,
    *,
    name: str,
    class_names: Sequence[str],
    labels: Sequence[int] | Tensor | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> ImageSet:
    """Wrap a dataset that yields (float image [C, H, W] in [0, 1], label).

    Labels are taken from ``labels``, else from the dataset's ``targets``, else by reading every example once. Unless
    given, ``mean`` and ``std`` are 0.5.
    """
    if len(dataset) == 0:
        raise GradveilError(f"{name} is empty")
    if labels is None:
        labels = getattr(dataset, "targets", None)
    if labels is None:
        labels = [int(dataset[i][1]) for i in range(len(dataset))]
    if len(labels) != len(dataset):
        raise GradveilError(f"{name} has {len(dataset)} examples but {len(labels)} labels")
    channels, height, width = _image(dataset, 0, name).shape
    return DatasetImages(
        name=name,
        labels=torch.as_tensor(labels).long(),
        class_names=tuple(class_names),
        mean=mean or (0.5,) * channels,
        std=std or (0.5,) * channels,
        dataset=dataset,
        positions=torch.arange(len(dataset)),
        shape_of_one=(channels, height, width),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class DatasetImages(ImageSet):
    """Examples of ``dataset`` at ``positions`` [n]; see :func:`from_dataset`."""

    dataset: MapStyle
    positions: Tensor
    shape_of_one: tuple[int, int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.shape_of_one

    def _inputs(self, indices: Tensor) -> Tensor:
        if len(indices) == 0:
            return torch.empty(0, *self.shape)
        expected = zip(self.positions[indices].tolist(), self.labels[indices].tolist(), strict=True)
        return torch.stack(
            [_image(self.dataset, at, self.name, shape=self.shape, label=label) for at, label in expected]
        )

    def _only(self, indices: Tensor) -> Self:
        return replace(self, positions=self.positions[indices], labels=self.labels[indices])


def _image(
    dataset: MapStyle, position: int, name: str, *, shape: tuple[int, int, int] | None = None, label: int | None = None
) -> Tensor:
    """One checked image: another shape, range or label than promised would make an audit silently wrong."""
    image, found = dataset[position]
    if not isinstance(image, Tensor) or image.ndim != 3 or not image.is_floating_point():
        raise GradveilError(
            f"{name}: example {position} is not a float tensor [C, H, W]; use ToTensor as its transform"
        )
    if not bool(((image >= 0) & (image <= 1)).all()):
        raise GradveilError(
            f"{name}: example {position} leaves [0, 1]; do not normalise in the dataset, models do that"
        )
    if shape is not None and image.shape != shape:
        raise GradveilError(f"{name}: example {position} is {list(image.shape)}, not {list(shape)}; resize to one size")
    if label is not None and int(found) != label:
        raise GradveilError(
            f"{name}: example {position} has label {int(found)} but {label} was expected; pass labels=..."
        )
    return image.detach().float().cpu()
