"""Data sets: fetched, shipped, local or a user's own."""

from gradveil.data import cifar, digits  # noqa: F401  (each registers its data sets)
from gradveil.data.folders import IMAGENET_MEAN, IMAGENET_STD
from gradveil.data.registry import DATASETS, load
from gradveil.data.sets import UNKNOWN, FileImages, ImageSet, Indices, MemoryImages, from_dataset

__all__ = [
    "DATASETS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "UNKNOWN",
    "FileImages",
    "ImageSet",
    "Indices",
    "MemoryImages",
    "from_dataset",
    "load",
]
