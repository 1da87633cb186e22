"""Reads idx files, the format of MNIST and its kin, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from gradveil.core.errors import BadFileError

_UNSIGNED_BYTE = 0x08
_MOST_BYTES = 1 << 30  # EMNIST ByClass, the largest of the family, has about half of this
_CHUNK = 1 << 20


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """The array in an idx file of unsigned bytes, uint8 with that many dimensions."""
    try:
        with _opened(path) as file:
            return _parse(file, path, dimensions)
    except (OSError, EOFError, zlib.error) as error:
        raise BadFileError(f"cannot read {path}: {error}") from error


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _parse(file: IO[bytes], path: Path, dimensions: int) -> Tensor:
    """The header is two zero bytes, the type, the number of dimensions, then each dimension in 32 bits, big-endian."""
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    magic = file.read(4)
    if magic != expected:
        raise BadFileError(
            f"{path} is no idx file of {dimensions} dimensions: it begins {magic.hex()}, not {expected.hex()}"
        )
    sizes = file.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise BadFileError(f"{path} is truncated: it ends within its header")
    shape = struct.unpack(f">{dimensions}I", sizes)
    count = math.prod(shape)
    if count > _MOST_BYTES:
        raise BadFileError(f"{path} claims {count} bytes of data, more than any data set of its kind")
    data, filled = bytearray(count), 0
    while filled < count and (more := file.readinto(memoryview(data)[filled : filled + _CHUNK])):  # type: ignore[attr-defined]
        filled += more
    if filled < count or file.read(1):
        found = "truncated" if filled < count else "longer than its header says"
        raise BadFileError(f"{path} is {found}: it should hold {count} bytes of data")
    return torch.frombuffer(data, dtype=torch.uint8).view(shape) if count else torch.empty(shape, dtype=torch.uint8)
