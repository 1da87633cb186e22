"""Generators from files of this project: the two that ship with it, and those that users trained."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from gradveil.core.progress import Progress
from gradveil.generators.base import Generator
from gradveil.generators.registry import GENERATORS
from gradveil.generators.resized import resized
from gradveil.generators.storage import load_generator


@GENERATORS.register("cifar10")
def cifar10(_progress: Progress, *, size: int | None = None) -> Generator:
    """DCGAN of the ten classes of CIFAR-10, 32x32, shipped: trained on the train split."""
    return resized(_shipped("cifar10"), size)


@GENERATORS.register("mnist")
def mnist(_progress: Progress, *, size: int | None = None) -> Generator:
    """DCGAN of the ten digits of MNIST, 28x28 grey, shipped: trained on the train split."""
    return resized(_shipped("mnist"), size)


@GENERATORS.register("file")
def file(_progress: Progress, *, path: str, size: int | None = None) -> Generator:
    """Your own, as written by `gradveil generator train`."""
    return resized(load_generator(Path(path).expanduser()), size)


def _shipped(name: str) -> Generator:
    with resources.as_file(resources.files("gradveil.generators") / "weights" / f"{name}.safetensors") as path:
        return load_generator(path)
