"""Class-per-folder images: ``PATH/CLASS/picture.jpg``, for ImageNet, CelebA, HAM10000 or a user's own."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.data.base import IMAGENET_MEAN, IMAGENET_STD, ImageSet
from gradveil.data.files import SUFFIXES, FileImages
from gradveil.data.registry import DATASETS, existing_folder


@DATASETS.register("folder")
def folder(_progress: Progress, *, path: str, size: int = 64) -> ImageSet:
    """Your own images in colour, one folder per class."""
    return read_folder(path, size=size, name="folder")


@DATASETS.register("imagenet")
def imagenet(_progress: Progress, *, path: str, size: int = 224) -> ImageSet:
    """ImageNet from a local folder such as ILSVRC/val, one folder per class."""
    return read_folder(path, size=size, name="imagenet")


@DATASETS.register("celeba")
def celeba(_progress: Progress, *, path: str, size: int = 64) -> ImageSet:
    """CelebA faces from a local folder, one folder per class: per identity, or per value of an attribute."""
    return read_folder(path, size=size, name="celeba")


@DATASETS.register("ham10000")
def ham10000(_progress: Progress, *, path: str, size: int = 64) -> ImageSet:
    """HAM10000 skin lesions from a local folder, one folder per diagnosis."""
    return read_folder(path, size=size, name="ham10000")


def read_folder(path: str, *, size: int, name: str) -> ImageSet:
    """Classes are the folders in ``path`` in sorted order; images are searched for at any depth below them."""
    root = existing_folder(path, name)
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise GradveilError(f"{name}: {root} has no folder per class; put the images in {root / 'CLASS'}")
    files: list[Path] = []
    counts: list[int] = []
    for class_name in classes:
        found = _image_files(root / class_name)
        if not found:
            raise GradveilError(f"{name}: {root / class_name} holds no image; add some or remove that folder")
        files += found
        counts.append(len(found))
    return FileImages(
        name=name,
        files=tuple(files),
        labels=torch.arange(len(classes)).repeat_interleave(torch.tensor(counts)),
        class_names=tuple(classes),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        size=(size, size),
    )


def _image_files(class_folder: Path) -> list[Path]:
    paths = (Path(parent) / file for parent, _, files in os.walk(class_folder) for file in files)
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES)
