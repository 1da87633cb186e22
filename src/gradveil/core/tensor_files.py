"""Tensor files: safetensors with a typed header, written whole or not at all, and hostile until checked when read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gradveil.core.atomic import write_atomically
from gradveil.core.errors import BadFileError
from gradveil.core.types import Json

VERSION = 1
MAX_BYTES = 16 * 2**30
_KEY = "gradveil"
DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL"})
"""The types of the tensors that are read, by their names in safetensors."""
MOST_DIMENSIONS = 16
"""No tensor of a model or a batch has more, and torch cannot compute with one of over 64."""
Shapes = dict[str, tuple[int, ...]]
Check = Callable[[Json, Shapes], None]
"""Looks at the header's meta and at every tensor's shape before any tensor is loaded, and raises if they cannot be."""


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], meta: Json) -> None:
    """Write named tensors with a header that says what the file is."""
    header = {_KEY: json.dumps({"kind": kind, "version": VERSION, "meta": meta}, allow_nan=False)}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(plain, metadata=header))


def read_tensors(
    path: Path, kind: str, *, check: Check | None = None, max_bytes: int = MAX_BYTES
) -> tuple[dict[str, Tensor], Json]:
    """The tensors and the meta of a file of this kind. Whatever is wrong with it is a BadFileError of one line."""
    tensors, meta = _read(path, kind, check, max_bytes, DTYPES)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadFileError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensors, meta


def read_state(
    path: Path, *, check: Check | None = None, max_bytes: int = MAX_BYTES, dtypes: Collection[str] = DTYPES
) -> dict[str, Tensor]:
    """The tensors of a safetensors file that anybody wrote. They may hold NaN: who asks for them looks for that."""
    return _read(path, None, check, max_bytes, dtypes)[0]


def written_by_gradveil(path: Path) -> bool:
    """Whether the header of a tensor file says that Gradveil wrote it."""
    _size(path)
    try:
        with safe_open(path, framework="pt") as file:
            return _KEY in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _read(
    path: Path, kind: str | None, check: Check | None, max_bytes: int, dtypes: Collection[str]
) -> tuple[dict[str, Tensor], Json]:
    size = _size(path)
    if size > max_bytes:
        raise BadFileError(f"{path} is too large: {size:,} bytes, at most {max_bytes:,} are read")
    try:
        with safe_open(path, framework="pt") as file:
            meta = {} if kind is None else _meta(path, kind, file.metadata())
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            for name, part in slices.items():
                if part.get_dtype() not in dtypes:
                    raise BadFileError(f"{path}: tensor {name!r} is of type {part.get_dtype()}, which is not read here")
                if len(part.get_shape()) > MOST_DIMENSIONS:
                    raise BadFileError(f"{path}: tensor {name!r} has more than {MOST_DIMENSIONS} dimensions")
            if check is not None:
                check(meta, {name: tuple(part.get_shape()) for name, part in slices.items()})
            return {name: file.get_tensor(name) for name in slices}, meta
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> BadFileError:
    return BadFileError(f"{path} is damaged or not a safetensors file: {' '.join(str(error).split())}")


def _size(path: Path) -> int:
    if not path.is_file():
        raise BadFileError(f"there is no file {path}")
    return path.stat().st_size


def _meta(path: Path, kind: str, header: Mapping[str, str] | None) -> Json:
    try:
        said = json.loads((header or {})[_KEY])
        found, version, meta = said["kind"], said["version"], said["meta"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadFileError(f"{path} was not written by Gradveil: its header does not say what it holds") from None
    if found != kind:
        raise BadFileError(f"{path} holds {str(found)[:40]!r}, not {kind!r}: was it renamed?")
    if version != VERSION or not isinstance(meta, dict):
        raise BadFileError(f"{path} is of version {str(version)[:10]!r}; this Gradveil reads version {VERSION}")
    return meta
