"""A user's checkpoint of a published generator: names and shapes are compared before anything of it is used."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gradveil.core.errors import BadFileError
from gradveil.core.tensor_files import Shapes, read_state

Expect = Callable[[Shapes], Shapes]
"""From the shapes in a file to those that the architecture they hint at must have."""

MAX_BYTES = 4 * 2**30
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Those that every operation here can read, by their names in safetensors."""


def read_checkpoint(path: Path, expect: Expect, *, parts: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors that ``expect`` asks for, in float32, from a safetensors file or a torch file without code in it.

    Torch files may keep the tensors below one of the names in ``parts``, beside other things.
    """
    if not path.is_file():
        raise BadFileError(f"there is no file {path}")
    if path.stat().st_size > MAX_BYTES:
        raise BadFileError(f"{path} is too large: {path.stat().st_size:,} bytes, at most {MAX_BYTES:,} are read")
    if path.suffix == ".safetensors":
        tensors = read_state(path, check=lambda _, shapes: _compare(path, shapes, expect), dtypes=_DTYPES)
    else:
        tensors = _from_torch(path, parts)
        _compare(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expect)
    # Copied, because they may lie in the file itself, which may change.
    whole = torch.contiguous_format
    copies = {name: tensor.to(torch.float32, copy=True, memory_format=whole) for name, tensor in tensors.items()}
    for name, tensor in copies.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadFileError(f"{path}: tensor {name!r} holds NaN or infinity")
    return copies


def dimensions(path: Path, shapes: Shapes, name: str, count: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there, with so many dimensions and none of them empty."""
    if name not in shapes:
        raise BadFileError(f"{path}: tensor {name!r} is missing")
    if len(shapes[name]) != count or 0 in shapes[name]:
        raise BadFileError(f"{path}: tensor {name!r} is {list(shapes[name])}, not of {count} dimensions")
    return shapes[name]


def _from_torch(path: Path, parts: tuple[str, ...]) -> dict[str, Tensor]:
    try:
        packed = _unpacked_bytes(path) > path.stat().st_size
        content = None if packed else torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a damaged pickle may raise nearly anything, in torch's reader too
        raise BadFileError(
            f"{path} is damaged or holds more than tensors; save them alone: torch.save(model.state_dict(), FILE)"
        ) from None
    if packed:
        raise BadFileError(f"{path} is compressed, which torch.save never does; save it anew")
    for part in parts:
        if isinstance(content, dict) and isinstance(content.get(part), dict):
            content = content[part]
            break
    if not isinstance(content, dict) or not content:
        raise BadFileError(f"{path} holds no tensors by name")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        dense = tensor.layout is torch.strided and not tensor.is_nested  # one number beside the other
        if not dense or tensor.device.type != "cpu" or tensor.dtype not in _DTYPES.values():
            raise BadFileError(f"{path}: tensor {name!r} is sparse, quantised, without values or of a rare type")
        # Strides may repeat a few numbers into a huge tensor, which would only show when it is copied.
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise BadFileError(f"{path}: tensor {name!r} holds fewer numbers than its shape says")
    return tensors


def _unpacked_bytes(path: Path) -> int:
    """What reading a torch file takes: a compressed one may be small and fill the memory."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":  # how torch knows an archive; before 1.6 it saved one pickle after the other
            return 0
    with zipfile.ZipFile(path) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def _compare(path: Path, found: Shapes, expect: Expect) -> None:
    """Raise unless the file has exactly the tensors that the architecture must have."""
    wanted = expect(found)
    for name, shape in wanted.items():
        if dimensions(path, found, name, len(shape)) != shape:
            raise BadFileError(f"{path}: tensor {name!r} is {list(found[name])}, not {list(shape)}")
    for name in found:
        if name not in wanted:
            raise BadFileError(f"{path}: tensor {name!r} has no place in this architecture")
