"""A data set of image files, decoded when a batch is asked for."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.data.base import ImageSet

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
_FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")  # whatever a file is called, no decoder that runs a program


@dataclass(frozen=True, eq=False, kw_only=True)
class FileImages(ImageSet):
    """One file per image, cropped around its middle to the aspect of ``size`` (height, width) and scaled to it.

    Images are read as grey where ``mean`` is of one channel, and as RGB otherwise; 16 bits are scaled to 8.
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
        with Image.open(path, formats=_FORMATS) as image:
            plain = _eight_bits(image, path).convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        raise BadFileError(f"cannot read the image {path}: {error}") from error
    fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(fitted)).view(height, width, channels).permute(2, 0, 1)


def _eight_bits(image: Image.Image, path: Path) -> Image.Image:
    """The image with values up to 255. Pillow would clip larger ones, so that nearly all of a scan were white."""
    # PNG and PPM have at most 16 bits, which Pillow holds in 32 for some of them; TIFF may use all 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise BadFileError(f"the image {path} has 32 bits per pixel and no set range; save it with 8 bits")
    return image
