"""Data sets by name: ``load("cifar10:split=test")``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import Registry
from gradveil.data.base import ImageSet

DATASETS: Registry[ImageSet] = Registry("data set")
"""Factories take the progress of a possible download; their keyword-only arguments are the options of the spec."""

Split = Literal["train", "test"]


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
