"""Data sets (fetched, shipped, local or a user's own) and how they are dealt out to clients."""

from gradveil.data import cifar, digits, folders, photos, samples  # noqa: F401  (each registers its data sets)
from gradveil.data.base import IMAGENET_MEAN, IMAGENET_STD, ImageSet, Indices
from gradveil.data.files import FileImages
from gradveil.data.memory import MemoryImages
from gradveil.data.partition import dirichlet, iid, shards
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
    "dirichlet",
    "from_dataset",
    "iid",
    "load",
    "shards",
]
