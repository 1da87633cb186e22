"""Faces and photographs that are fetched: ORL faces, labelled 64x64 photographs, Open Images photographs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gradveil import assets
from gradveil.core.progress import Progress
from gradveil.data.base import IMAGENET_MEAN, IMAGENET_STD, ImageSet
from gradveil.data.files import FileImages
from gradveil.data.memory import MemoryImages
from gradveil.data.registry import DATASETS

# Computed over the 400 faces.
ORL_MEAN, ORL_STD = (0.4416,), (0.1958,)
ORL_PEOPLE, ORL_EACH = 40, 10
ORL_NATIVE_SIZE = (112, 92)
TINY_IMAGENET_CLASSES = 200


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
        mean=ORL_MEAN * channels,
        std=ORL_STD * channels,
        size=(size, size) if size is not None else ORL_NATIVE_SIZE,
    )


@DATASETS.register("photos-64")
def photos_64(progress: Progress) -> ImageSet:
    """500 photographs, 64x64, labelled with the 200 classes of Tiny ImageNet."""
    folder = assets.fetch("photos-64", progress=progress)
    label_of = _read_labels(folder / "labels.yml")
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


def _read_labels(path: Path) -> dict[str, int]:
    """Lines ``FILE: LABEL``; that much YAML needs no parser."""
    pairs = (line.split(": ") for line in path.read_text().splitlines() if line.strip())
    return {file: int(label) for file, label in pairs}
