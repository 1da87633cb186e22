"""Weights as TensorFlow.js keeps them: ``model.json`` lists names, types and shapes; shards hold the numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import BadFileError
from gradveil.core.reading import read_bytes

_TYPES = {"float32": np.dtype("<f4"), "int32": np.dtype("<i4")}


def read_tfjs(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder by name. Shards that are longer or shorter than the list says are refused."""
    listing = folder / "model.json"
    try:
        groups = json.loads(read_bytes(listing))["weightsManifest"]
        weights: dict[str, Tensor] = {}
        for group in groups:
            blob = b"".join(_shard(folder, name) for name in group["paths"])
            weights |= _cut(blob, group["weights"], listing)
        return weights
    except OSError as error:
        raise BadFileError(f"cannot read {error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise BadFileError(f"{listing} does not list weights as TensorFlow.js does") from None


def _shard(folder: Path, name: str) -> bytes:
    if Path(name).name != name:
        raise BadFileError(f"{folder / 'model.json'} names a shard outside its folder: {name!r}")
    return read_bytes(folder / name, most=2**31)


def _cut(blob: bytes, entries: list[dict[str, Any]], listing: Path) -> dict[str, Tensor]:
    """The tensors of one group, which stand one after the other without gaps."""
    found, at = {}, 0
    for entry in entries:
        kind, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
        if not all(type(side) is int and side >= 0 for side in shape):
            raise BadFileError(f"{listing}: weight {entry['name']!r} has an impossible shape")
        count = math.prod(shape)
        if at + count * kind.itemsize > len(blob):
            raise BadFileError(f"{listing.parent}: the shards end within weight {entry['name']!r}; get them again")
        found[entry["name"]] = torch.from_numpy(np.frombuffer(blob, kind, count, at).reshape(shape).copy())
        at += count * kind.itemsize
    if at != len(blob):
        raise BadFileError(f"{listing.parent}: the shards hold {len(blob) - at:,} bytes more than {listing.name} lists")
    return found
