"""Rebuilds the samples shipped in src/gradveil/data/samples from the fetched test sets.

The first 10 images of each class in the order of the test set, going round the classes in turn.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from gradveil.data import MemoryImages, load
from gradveil.data.registry import COLUMNS

PER_CLASS = 10
FOLDER = Path(__file__).resolve().parents[1] / "src" / "gradveil" / "data" / "samples"


def round_robin(labels: Tensor, classes: int) -> Tensor:
    """Indices of the first PER_CLASS images of each class: class 0, 1, 2, ..., then each class's second, and so on."""
    firsts = [(labels == label).nonzero().flatten()[:PER_CLASS] for label in range(classes)]
    return torch.stack(firsts, dim=1).flatten()


def to_sheet(images: Tensor) -> Image.Image:
    """Images uint8 [rows * 10, C, H, W] as one picture, ten in a row."""
    count, channels, height, width = images.shape
    grid = images.view(count // COLUMNS, COLUMNS, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = grid.reshape(count // COLUMNS * height, COLUMNS * width, channels)
    return Image.fromarray(pixels.numpy() if channels == 3 else pixels[..., 0].numpy())


def write(name: str) -> None:
    test = load(f"{name}:split=test")
    assert isinstance(test, MemoryImages)
    indices = round_robin(test.labels, len(test.class_names))
    chosen = test.subset(indices)
    _, height, width = chosen.shape
    about = {
        "source": f"{name} test set",
        "height": height,
        "width": width,
        "class_names": chosen.class_names,
        "mean": chosen.mean,
        "std": chosen.std,
        "labels": chosen.labels.tolist(),
        "indices": indices.tolist(),
    }
    to_sheet(chosen.images).save(FOLDER / f"{name}.png", optimize=True)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in about.items())
    (FOLDER / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in ("cifar10", "mnist"):
        write(name)
