"""A data set of image files, decoded when a batch is asked for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.reading import check_plain
from gradveil.data.base import ImageSet

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
            turn = _UPRIGHT.get(_orientation(image))
            plain = _eight_bits(image, path).convert("L" if channels == 1 else "RGB")
            plain = plain if turn is None else plain.transpose(turn)
    except BadFileError:
        raise
    except Exception as error:  # a damaged file may raise nearly anything in a decoder
        why = " ".join(str(error).split()) or type(error).__name__
        raise BadFileError(f"cannot read the image {path}: {why}") from error
    fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(fitted)).view(height, width, channels).permute(2, 0, 1)


def _orientation(image: Image.Image) -> int:
    """How the camera was held, as EXIF says; 1 is upright. What cannot be read says nothing of the picture."""
    try:
        said = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        return 1
    return said if type(said) is int else 1


def _eight_bits(image: Image.Image, path: Path) -> Image.Image:
    """The image with values up to 255. Pillow would clip larger ones, so that nearly all of a scan were white."""
    # PNG and PPM have at most 16 bits, which Pillow holds in 32 for some of them; TIFF may use all 32.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) / np.float32(257)).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise BadFileError(f"the image {path} has 32 bits per pixel and no set range; save it with 8 bits")
    return image
