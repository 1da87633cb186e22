"""Data sets by name, ``load("cifar10:split=test")``, and the samples that ship: ready without a download.

The samples are 100 test images each of CIFAR-10 and MNIST: a PNG sheet, 10 by 10 and lossless, with a json file beside
it. Every row holds one image of each class in turn: the first k images, for k up to 10, are of k different classes.
``samples/README.md`` says where they come from.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import Registry
from gradveil.data.sets import ImageSet, MemoryImages

DATASETS: Registry[ImageSet] = Registry("data set")
"""Factories take the progress of a possible download; their keyword-only arguments are the options of the spec."""

Split = Literal["train", "test"]

COLUMNS = 10
"""Images in a row of a sheet."""


def load(spec: str, *, progress: Progress = SILENT) -> ImageSet:
    """Build the data set a spec such as ``mnist:split=test`` names, fetching it first where that is needed.

    >>> samples = load("cifar10-samples")
    >>> len(samples), samples.domain.shape
    (100, (3, 32, 32))
    >>> [samples.class_names[i] for i in samples.labels[:3]]
    ['airplane', 'automobile', 'bird']
    """
    return DATASETS.build(spec, progress)


def existing_folder(path: str, name: str) -> Path:
    """A folder the user named, or an error that says what is there instead."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise GradveilError(f"{name}: {folder} {found}; give the folder of the data as path=FOLDER")
    return folder


def first_of(data: ImageSet, count: int | None) -> ImageSet:
    """The first so many examples under the same name; None: all."""
    if count is None:
        return data
    if not 1 <= count <= len(data):
        raise GradveilError(f"{data.name} has {len(data)} examples: first is from 1 to that, not {count}")
    return data.subset(range(count))


@DATASETS.register("cifar10-samples")
def cifar10_samples(_progress: Progress) -> ImageSet:
    """100 test images of CIFAR-10, 10 of each class in turn, shipped with gradveil."""
    return _shipped("cifar10")


@DATASETS.register("mnist-samples")
def mnist_samples(_progress: Progress) -> ImageSet:
    """100 test digits of MNIST, 10 of each class in turn, shipped with gradveil."""
    return _shipped("mnist")


def _shipped(name: str) -> ImageSet:
    folder = resources.files("gradveil.data") / "samples"
    about = json.loads((folder / f"{name}.json").read_text())
    with (folder / f"{name}.png").open("rb") as file, Image.open(file) as sheet:
        images = from_sheet(sheet, height=about["height"], width=about["width"])
    return MemoryImages(
        name=f"{name}-samples",
        images=images,
        labels=torch.tensor(about["labels"]),
        class_names=tuple(about["class_names"]),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
    )


def from_sheet(sheet: Image.Image, *, height: int, width: int) -> Tensor:
    """The images of a sheet, ten in a row, as uint8 [n, C, height, width]."""
    pixels = torch.from_numpy(np.array(sheet)).view(sheet.height, sheet.width, -1)
    grid = pixels.view(sheet.height // height, height, COLUMNS, width, -1).permute(0, 2, 4, 1, 3)
    return grid.reshape(-1, grid.shape[2], height, width)
