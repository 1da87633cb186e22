"""Labelled images: labels at hand, pictures on demand as a Batch, from memory, from files or from a user's Dataset."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.reading import check_plain
from gradveil.core.types import Batch
from gradveil.domains import Images

Indices = Sequence[int] | Tensor
"""Positions in a data set, each from 0 to its length minus 1, in any order, repeats allowed."""

UNKNOWN = -1
"""Stands for the label of an image that nobody has labelled, such as a picture that private ones are hidden among."""
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
_FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")  # whatever a file is called, no decoder that runs a program
_MOST_PIXELS = 100_000_000
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By the orientation that a camera noted, what makes the picture upright, as every viewer shows it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSet(ABC):
    """Labelled images of one shape. Subclasses say where the pixels come from.

    ``labels`` is int64 [n], ``UNKNOWN`` where there is none; ``class_names`` names each label, ``mean`` and ``std`` are
    per channel of inputs in [0, 1].
    """

    name: str
    labels: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels_are_people: bool = False
    """Whether a label says who somebody is, as for faces."""

    def __post_init__(self) -> None:
        if self.labels.ndim != 1 or self.labels.dtype != torch.int64:
            raise GradveilError(f"{self.name}: labels must be int64 of shape [n]")
        outside = self.labels[(self.labels < UNKNOWN) | (self.labels >= len(self.class_names))]
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
        """The images at checked indices, floating point [n, C, H, W] in [0, 1]."""

    @abstractmethod
    def _only(self, indices: Tensor) -> Self:
        """The set of the images at checked indices."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def domain(self) -> Images:
        return Images(*self.shape, classes=len(self.class_names), mean=self.mean, std=self.std)

    def batch(self, indices: Indices) -> Batch:
        """The chosen images and labels: inputs [n, C, H, W] in [0, 1], labels [n]."""
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


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryImages(ImageSet):
    """``images`` is [n, C, H, W]: bytes, or floating point in [0, 1].

    >>> two = MemoryImages(
    ...     name="two greys", images=torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1),
    ...     labels=torch.tensor([0, 1]), class_names=("dark", "light"), mean=(0.5,), std=(0.5,))
    >>> two.batch([1, 0]).inputs.flatten()
    tensor([1., 0.])
    """

    images: Tensor

    @classmethod
    def unscaled(cls, *, name: str, images: Tensor, labels: Tensor, class_names: tuple[str, ...]) -> Self:
        """Images whose mean and deviation nobody knows: a model that normalises takes them as they are."""
        channels = images.shape[1]
        mean, std = (0.0,) * channels, (1.0,) * channels
        return cls(name=name, images=images, labels=labels, class_names=class_names, mean=mean, std=std)

    def __post_init__(self) -> None:
        super().__post_init__()
        floating = self.images.is_floating_point()
        if not (floating or self.images.dtype == torch.uint8) or self.images.ndim != 4:
            raise GradveilError(f"{self.name}: images must be uint8 or floating point of shape [n, C, H, W]")
        if len(self.images) != len(self.labels):
            raise GradveilError(f"{self.name} has {len(self.images)} images but {len(self.labels)} labels")
        if floating and self.images.numel() and not (self.images.min() >= 0 and self.images.max() <= 1):
            raise GradveilError(f"{self.name}: inputs are in [0, 1]; put the normalization into the model")

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.images.shape
        return (channels, height, width)

    def _inputs(self, indices: Tensor) -> Tensor:
        chosen = self.images[indices.to(self.images.device)]
        return chosen if chosen.is_floating_point() else chosen.float() / 255

    def to(self, device: str) -> Self:
        return replace(self, images=self.images.to(device))

    def _only(self, indices: Tensor) -> Self:
        return replace(self, images=self.images[indices.to(self.images.device)], labels=self.labels[indices])


@dataclass(frozen=True, eq=False, kw_only=True)
class FileImages(ImageSet):
    """One file per image, cropped around its middle to the aspect of ``size`` (height, width) and scaled to it.

    Images are read as grey where ``mean`` is of one channel, and as RGB otherwise; 16 bits are scaled to 8, and what a
    camera held on its side took is turned upright.
    """

    files: tuple[Path, ...]
    size: tuple[int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.files) != len(self.labels):
            raise GradveilError(f"{self.name} has {len(self.files)} files but {len(self.labels)} labels")
        if min(self.size) < 1:
            raise GradveilError(f"{self.name}: size must be at least 1 pixel, not {min(self.size)}")

    @property
    def shape(self) -> tuple[int, int, int]:
        return (len(self.mean), *self.size)

    def _inputs(self, indices: Tensor) -> Tensor:
        if len(indices) == 0:
            return torch.empty(0, *self.shape)
        pixels = [_decode(self.files[i], self.size, channels=len(self.mean)) for i in indices.tolist()]
        return torch.stack(pixels).float() / 255

    def _only(self, indices: Tensor) -> Self:
        return replace(self, files=tuple(self.files[i] for i in indices.tolist()), labels=self.labels[indices])


def _decode(path: Path, size: tuple[int, int], *, channels: int) -> Tensor:
    """One image as uint8 [C, H, W]."""
    height, width = size
    try:
        check_plain(path)
        # Pillow warns of damage that it can live with, and of sizes that are refused here.
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=_FORMATS) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise BadFileError(f"the image {path} has over {_MOST_PIXELS:,} pixels; scale it down")
            image.load()  # before its orientation is looked at: Pillow turns a TIFF upright by itself
            plain: Image.Image = image
            # Pillow would clip values above 255, so that nearly all of a scan were white. PNG and PPM have at most 16
            # bits, which Pillow holds in 32 for some of them; TIFF may use all 32.
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
                plain = Image.fromarray((np.asarray(image) / np.float32(257)).round().astype(np.uint8))
            elif image.mode in ("I", "F"):
                raise BadFileError(f"the image {path} has 32 bits per pixel and no set range; save it with 8 bits")
            plain = plain.convert("L" if channels == 1 else "RGB")
            turn = None
            with suppress(Exception):  # what cannot be read of the EXIF says nothing of the picture
                noted = image.getexif().get(ExifTags.Base.Orientation)
                turn = _UPRIGHT.get(noted) if type(noted) is int else None
            plain = plain if turn is None else plain.transpose(turn)
    except BadFileError:
        raise
    except Exception as error:  # a damaged file may raise nearly anything in a decoder
        why = " ".join(str(error).split()) or type(error).__name__
        raise BadFileError(f"cannot read the image {path}: {why}") from error
    fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(fitted)).view(height, width, channels).permute(2, 0, 1)


class MapStyle(Protocol):
    """What ``torch.utils.data.Dataset`` promises: a length, and (image, label) by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


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
        """Another shape, range or label than promised would make an audit silently wrong."""
        images = []
        for position, label in zip(self.positions[indices].tolist(), self.labels[indices].tolist(), strict=True):
            image, found = self.dataset[position]
            images.append(_unit_range(image, f"{self.name}: example {position}"))
            if image.shape != self.shape:
                raise GradveilError(
                    f"{self.name}: example {position} is {list(image.shape)}, not {list(self.shape)}; "
                    f"resize to one size"
                )
            if int(found) != label:
                raise GradveilError(
                    f"{self.name}: example {position} has label {int(found)} but {label} was expected; pass labels=..."
                )
        return torch.stack(images) if images else torch.empty(0, *self.shape)

    def _only(self, indices: Tensor) -> Self:
        return replace(self, positions=self.positions[indices], labels=self.labels[indices])


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
    channels, height, width = _unit_range(dataset[0][0], f"{name}: example 0").shape
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


def _unit_range(image: Any, what: str) -> Tensor:
    """An image of a user's dataset, seen to be floating point [C, H, W] in [0, 1]."""
    if not isinstance(image, Tensor) or image.ndim != 3 or not image.is_floating_point():
        raise GradveilError(f"{what} is not a float tensor [C, H, W]; use ToTensor as its transform")
    if not bool(((image >= 0) & (image <= 1)).all()):
        raise GradveilError(f"{what} leaves [0, 1]; do not normalise in the dataset, models do that")
    return image.detach().float().cpu()
