"""The samples shipped inside the package: 100 CIFAR-10 test images and 100 MNIST test digits, ready without a download.

Each is a PNG sheet, 10 by 10 and lossless, with a json file beside it. Every row holds one image of each class in turn:
the first k images, for k up to 10, are of k different classes. ``samples/README.md`` says where they come from.
"""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gradveil.core.progress import Progress
from gradveil.data.base import ImageSet
from gradveil.data.cifar import CIFAR10_MEAN, CIFAR10_STD
from gradveil.data.digits import MNIST_MEAN, MNIST_STD
from gradveil.data.memory import MemoryImages
from gradveil.data.registry import DATASETS

COLUMNS = 10


@DATASETS.register("cifar10-samples")
def cifar10_samples(_progress: Progress) -> ImageSet:
    """100 test images of CIFAR-10, 10 of each class in turn, shipped with gradveil."""
    return _read("cifar10", CIFAR10_MEAN, CIFAR10_STD)


@DATASETS.register("mnist-samples")
def mnist_samples(_progress: Progress) -> ImageSet:
    """100 test digits of MNIST, 10 of each class in turn, shipped with gradveil."""
    return _read("mnist", MNIST_MEAN, MNIST_STD)


def to_sheet(images: Tensor) -> Image.Image:
    """Images uint8 [rows * 10, C, H, W] as one picture, ten in a row."""
    count, channels, height, width = images.shape
    grid = images.view(count // COLUMNS, COLUMNS, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = grid.reshape(count // COLUMNS * height, COLUMNS * width, channels)
    return Image.fromarray(pixels.numpy() if channels == 3 else pixels[..., 0].numpy())


def from_sheet(sheet: Image.Image, *, height: int, width: int) -> Tensor:
    """The images of a sheet, uint8 [n, C, height, width]: what :func:`to_sheet` was given."""
    pixels = torch.from_numpy(np.array(sheet)).view(sheet.height, sheet.width, -1)
    grid = pixels.view(sheet.height // height, height, COLUMNS, width, -1).permute(0, 2, 4, 1, 3)
    return grid.reshape(-1, grid.shape[2], height, width)


def _read(name: str, mean: tuple[float, ...], std: tuple[float, ...]) -> ImageSet:
    folder = resources.files("gradveil.data") / "samples"
    about = json.loads((folder / f"{name}.json").read_text())
    with (folder / f"{name}.png").open("rb") as file, Image.open(file) as sheet:
        images = from_sheet(sheet, height=about["height"], width=about["width"])
    return MemoryImages(
        name=f"{name}-samples",
        images=images,
        labels=torch.tensor(about["labels"]),
        class_names=tuple(about["class_names"]),
        mean=mean,
        std=std,
    )
