"""Class-per-folder images, ``PATH/CLASS/picture.jpg``, and faces and photographs that are fetched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gradveil import assets
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.data.registry import DATASETS, existing_folder
from gradveil.data.sets import SUFFIXES, FileImages, ImageSet, MemoryImages

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# Computed over the 400 faces.
ORL_MEAN, ORL_STD = (0.4416,), (0.1958,)
ORL_PEOPLE, ORL_EACH = 40, 10
ORL_NATIVE_SIZE = (112, 92)
TINY_IMAGENET_CLASSES = 200


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
        below = (Path(parent) / file for parent, _, names in os.walk(root / class_name) for file in names)
        found = sorted(file for file in below if file.suffix.lower() in SUFFIXES)
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


@DATASETS.register("orl-faces")
def orl_faces(progress: Progress, *, size: int | None = 64, channels: Literal[1, 3] = 1) -> ImageSet:
    """Faces, grey: 10 photographs each of 40 people; the label is the person. size=none keeps 112x92.

    With three channels each is the same grey, for generators and models of coloured pictures.
    """
    folder = assets.fetch("orl-faces", progress=progress)
    people, shots = range(1, ORL_PEOPLE + 1), range(1, ORL_EACH + 1)
    return FileImages(
        name="orl-faces",
        files=tuple(folder / f"s{person}" / f"{shot}.pgm" for person in people for shot in shots),
        labels=torch.arange(ORL_PEOPLE).repeat_interleave(ORL_EACH),
        class_names=tuple(f"person {person}" for person in people),
        labels_are_people=True,
        mean=ORL_MEAN * channels,
        std=ORL_STD * channels,
        size=(size, size) if size is not None else ORL_NATIVE_SIZE,
    )


@DATASETS.register("photos-64")
def photos_64(progress: Progress) -> ImageSet:
    """500 photographs, 64x64, labelled with the 200 classes of Tiny ImageNet."""
    folder = assets.fetch("photos-64", progress=progress)
    # Lines "FILE: LABEL"; that much YAML needs no parser.
    pairs = (line.split(": ") for line in (folder / "labels.yml").read_text().splitlines() if line.strip())
    label_of = {file: int(label) for file, label in pairs}
    names = sorted(label_of)
    stacked = np.stack([np.load(folder / name, allow_pickle=False) for name in names])
    return MemoryImages(
        name="photos-64",
        images=torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous(),
        labels=torch.tensor([label_of[name] for name in names]),
        class_names=tuple(f"class {i}" for i in range(TINY_IMAGENET_CLASSES)),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


@DATASETS.register("open-images")
def open_images(progress: Progress, *, size: int = 64, classes: int = 10) -> ImageSet:
    """919 photographs without labels: every label is 0, of as many classes as asked for."""
    folder = assets.fetch("open-images", progress=progress)
    files = tuple(sorted((folder / "samples" / "starter").glob("*.jpg")))
    return FileImages(
        name="open-images",
        files=files,
        labels=torch.zeros(len(files), dtype=torch.int64),
        class_names=("unlabelled", *(f"unused {i}" for i in range(1, classes))),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        size=(size, size),
    )
