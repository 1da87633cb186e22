"""MNIST, Fashion-MNIST and EMNIST: idx files, fetched or in the layout torchvision leaves on disk."""

from __future__ import annotations

import gzip
import math
import string
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gradveil import assets
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import Progress
from gradveil.data.registry import DATASETS, Split, existing_folder, first_of
from gradveil.data.sets import ImageSet, MemoryImages

MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
_UNSIGNED_BYTE = 0x08
_MOST_BYTES = 1 << 30  # EMNIST ByClass, the largest of the family, has about half of this
_CHUNK = 1 << 20
_STEMS: dict[Split, str] = {"train": "train", "test": "t10k"}


@dataclass(frozen=True)
class _Family:
    """What the splits of one data set share; ``name`` is the folder torchvision gives it."""

    name: str
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = MNIST_MEAN
    std: tuple[float, ...] = MNIST_STD
    first_label: int = 0
    transposed: bool = False


_MNIST = _Family("MNIST", tuple(string.digits))
_FASHION = _Family(
    "FashionMNIST",
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    mean=(0.2860,),  # of the 60,000 training images
    std=(0.3530,),
)

EmnistVariant = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
# Lower-case letters that do not look like their capitals; the others share the class of the capital.
_DISTINCT_LOWERCASE = "abdefghnqrt"
_EMNIST_CLASSES = {
    "byclass": string.digits + string.ascii_uppercase + string.ascii_lowercase,
    "bymerge": string.digits + string.ascii_uppercase + _DISTINCT_LOWERCASE,
    "balanced": string.digits + string.ascii_uppercase + _DISTINCT_LOWERCASE,
    "letters": string.ascii_lowercase,
    "digits": string.digits,
    "mnist": string.digits,
}


@DATASETS.register("mnist")
def mnist(progress: Progress, *, split: Split = "train", path: str | None = None, first: int | None = None) -> ImageSet:
    """Handwritten digits, 28x28 grey: 60,000 train, 10,000 test; of them the ``first`` so many."""
    folder = existing_folder(path, "mnist") if path else assets.fetch("mnist", progress=progress)
    return first_of(_read(f"mnist {split}", _MNIST, folder, _STEMS[split]), first)


@DATASETS.register("fashion-mnist")
def fashion_mnist(progress: Progress, *, split: Split = "train", path: str | None = None) -> ImageSet:
    """Pieces of clothing, 28x28 grey: 60,000 train, 10,000 test."""
    folder = existing_folder(path, "fashion-mnist") if path else assets.fetch("fashion-mnist", progress=progress)
    return _read(f"fashion-mnist {split}", _FASHION, folder, _STEMS[split])


@DATASETS.register("emnist")
def emnist(_progress: Progress, *, path: str, variant: EmnistVariant = "balanced", split: Split = "train") -> ImageSet:
    """Handwritten letters and digits, 28x28 grey, from a local folder of the EMNIST idx files.

    On disk the images are transposed, and the letters variant counts its labels from 1: here images are upright and
    labels count from 0. Mean and std are those of MNIST, which was made the same way.
    """
    first = 1 if variant == "letters" else 0
    family = _Family("EMNIST", tuple(_EMNIST_CLASSES[variant]), first_label=first, transposed=True)
    return _read(f"emnist {variant} {split}", family, existing_folder(path, "emnist"), f"emnist-{variant}-{split}")


def _read(name: str, family: _Family, folder: Path, stem: str) -> ImageSet:
    """The pair of idx files whose names begin with ``stem``."""
    images_file = _find(folder, family, f"{stem}-images-idx3-ubyte")
    images = read_idx(images_file, dimensions=3)
    labels = read_idx(_find(folder, family, f"{stem}-labels-idx1-ubyte"), dimensions=1)
    if len(images) != len(labels):
        raise BadFileError(f"{images_file} holds {len(images)} images but its label file {len(labels)} labels")
    upright = images.transpose(1, 2).contiguous() if family.transposed else images
    return MemoryImages(
        name=name,
        images=upright[:, None],
        labels=labels.long() - family.first_label,
        class_names=family.class_names,
        mean=family.mean,
        std=family.std,
    )


def _find(folder: Path, family: _Family, file: str) -> Path:
    """The file or its .gz: in the folder itself, or where torchvision or the EMNIST archive put it below."""
    for below in (".", f"{family.name}/raw", "raw", "gzip"):
        for suffix in ("", ".gz"):
            candidate = folder / below / f"{file}{suffix}"
            if candidate.is_file():
                return candidate
    raise GradveilError(f"{folder} holds no {file}, plain or .gz, there or in {family.name}/raw")


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """The array in an idx file of unsigned bytes, plain or gzipped, as uint8 with that many dimensions.

    The header is two zero bytes, the type, the number of dimensions, then each dimension in 32 bits, big-endian.
    """
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if magic != expected:
                raise BadFileError(
                    f"{path} is no idx file of {dimensions} dimensions: it begins {magic.hex()}, not {expected.hex()}"
                )
            sizes = file.read(4 * dimensions)
            if len(sizes) < 4 * dimensions:
                raise BadFileError(f"{path} is truncated: it ends within its header")
            shape = struct.unpack(f">{dimensions}I", sizes)
            count = math.prod(shape)
            if count > _MOST_BYTES:
                raise BadFileError(f"{path} claims {count} bytes of data, more than any data set of its kind")
            data, filled = bytearray(count), 0
            while filled < count and (more := file.readinto(memoryview(data)[filled : filled + _CHUNK])):
                filled += more
            if filled < count or file.read(1):
                found = "truncated" if filled < count else "longer than its header says"
                raise BadFileError(f"{path} is {found}: it should hold {count} bytes of data")
    except (OSError, EOFError, zlib.error) as error:
        raise BadFileError(f"cannot read {path}: {error}") from error
    return torch.frombuffer(data, dtype=torch.uint8).view(shape) if count else torch.empty(shape, dtype=torch.uint8)
