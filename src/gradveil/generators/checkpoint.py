"""A user's checkpoint of a published generator: names and shapes are compared before anything of it is used."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradveil.core.errors import BadFileError

Shapes = Mapping[str, tuple[int, ...]]
Expect = Callable[[Shapes], Shapes]
"""From the shapes in a file to those that the architecture they hint at must have."""

MAX_BYTES = 4 * 2**30


def read_checkpoint(path: Path, expect: Expect, *, parts: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors that ``expect`` asks for, in float32, from a safetensors file or a torch file without code in it.

    Torch files may keep the tensors below one of the names in ``parts``, beside other things.
    """
    if not path.is_file():
        raise BadFileError(f"there is no file {path}")
    if path.stat().st_size > MAX_BYTES:
        raise BadFileError(f"{path} is too large: {path.stat().st_size:,} bytes, at most {MAX_BYTES:,} are read")
    tensors = _from_safetensors(path, expect) if path.suffix == ".safetensors" else _from_torch(path, expect, parts)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadFileError(f"{path}: tensor {name!r} holds NaN or infinity")
    # Copied, because they may lie in the file itself, which may change.
    whole = torch.contiguous_format
    return {name: tensor.to(torch.float32, copy=True, memory_format=whole) for name, tensor in tensors.items()}


def dimensions(path: Path, shapes: Shapes, name: str, count: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there, with so many dimensions and none of them empty."""
    if name not in shapes:
        raise BadFileError(f"{path}: tensor {name!r} is missing")
    if len(shapes[name]) != count or 0 in shapes[name]:
        raise BadFileError(f"{path}: tensor {name!r} is {list(shapes[name])}, not of {count} dimensions")
    return shapes[name]


def _from_safetensors(path: Path, expect: Expect) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            wanted = _compared(path, found, expect)
            return {name: file.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadFileError(f"{path} is damaged or not a safetensors file: {' '.join(str(error).split())}") from None


def _from_torch(path: Path, expect: Expect, parts: tuple[str, ...]) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError):
        raise BadFileError(
            f"{path} is damaged or holds more than tensors; save them alone: torch.save(model.state_dict(), FILE)"
        ) from None
    for part in parts:
        if isinstance(content, dict) and isinstance(content.get(part), dict):
            content = content[part]
            break
    if not isinstance(content, dict) or not content:
        raise BadFileError(f"{path} holds no tensors by name")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        # Strides may repeat a few numbers into a huge tensor, which would only show when it is copied.
        if tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise BadFileError(f"{path}: tensor {name!r} holds fewer numbers than its shape says")
    wanted = _compared(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expect)
    return {name: tensors[name] for name in wanted}


def _compared(path: Path, found: Shapes, expect: Expect) -> Shapes:
    wanted = expect(found)
    for name, shape in wanted.items():
        if dimensions(path, found, name, len(shape)) != shape:
            raise BadFileError(f"{path}: tensor {name!r} is {list(found[name])}, not {list(shape)}")
    for name in found:
        if name not in wanted:
            raise BadFileError(f"{path}: tensor {name!r} has no place in this architecture")
    return wanted
