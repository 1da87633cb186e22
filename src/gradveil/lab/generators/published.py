"""A user's checkpoint of a published generator: names and shapes are compared before anything of it is used."""

from __future__ import annotations

import zipfile
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
    tensors = _from_safetensors(path, expect) if path.suffix == ".safetensors" else _from_torch(path, expect, parts)
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


def _from_safetensors(path: Path, expect: Expect) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            for name, part in slices.items():
                if part.get_dtype() not in _DTYPES:
                    raise BadFileError(f"{path}: tensor {name!r} is of type {part.get_dtype()}, which is not read here")
            wanted = _compared(path, {name: tuple(part.get_shape()) for name, part in slices.items()}, expect)
            return {name: file.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadFileError(f"{path} is damaged or not a safetensors file: {' '.join(str(error).split())}") from None


def _from_torch(path: Path, expect: Expect, parts: tuple[str, ...]) -> dict[str, Tensor]:
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
        if not _is_plain(tensor):
            raise BadFileError(f"{path}: tensor {name!r} is sparse, quantised, without values or of a rare type")
        # Strides may repeat a few numbers into a huge tensor, which would only show when it is copied.
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise BadFileError(f"{path}: tensor {name!r} holds fewer numbers than its shape says")
    wanted = _compared(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expect)
    return {name: tensors[name] for name in wanted}


def _unpacked_bytes(path: Path) -> int:
    """What reading a torch file takes: a compressed one may be small and fill the memory."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":  # how torch knows an archive; before 1.6 it saved one pickle after the other
            return 0
    with zipfile.ZipFile(path) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def _is_plain(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor lie in this machine's memory, one beside the other, in a common type."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and tensor.device.type == "cpu" and tensor.dtype in _DTYPES.values()


def _compared(path: Path, found: Shapes, expect: Expect) -> Shapes:
    wanted = expect(found)
    for name, shape in wanted.items():
        if dimensions(path, found, name, len(shape)) != shape:
            raise BadFileError(f"{path}: tensor {name!r} is {list(found[name])}, not {list(shape)}")
    for name in found:
        if name not in wanted:
            raise BadFileError(f"{path}: tensor {name!r} has no place in this architecture")
    return wanted
