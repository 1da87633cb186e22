"""Data sets: fetched, shipped, local or a user's own."""

from gradveil.data import cifar, digits, folders, photos, samples  # noqa: F401  (each registers its data sets)
from gradveil.data.base import IMAGENET_MEAN, IMAGENET_STD, ImageSet, Indices
from gradveil.data.files import FileImages
from gradveil.data.memory import MemoryImages
from gradveil.data.registry import DATASETS, load
from gradveil.data.wrapped import from_dataset

__all__ = [
    "DATASETS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "FileImages",
    "ImageSet",
    "Indices",
    "MemoryImages",
    "from_dataset",
    "load",
]
