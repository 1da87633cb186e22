"""The tensors of an observation file as the model of it computes with them, whichever types they were saved in."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.core.errors import BadFileError
from gradveil.core.types import Params


def as_built(path: Path, tensors: Params, module: nn.Module) -> Params:
    """All tensors but the labels in the precision of the model. Whole numbers in place of fractions are refused."""
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    usual = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    converted: Params = {}
    for name, tensor in tensors.items():
        dtype = dtypes.get(re.sub(r"^(earlier/\d+/)?(sent|reply|buffer)/", "", name), usual)
        if name == "labels" or tensor.dtype == dtype:
            converted[name] = tensor
            continue
        if tensor.is_floating_point() != dtype.is_floating_point:
            raise BadFileError(
                f"{path}: tensor {name!r} is of {_kind(tensor.dtype)}, where the model has {_kind(dtype)}"
            )
        converted[name] = tensor.to(dtype)
        if not bool(torch.isfinite(converted[name]).all()):
            raise BadFileError(f"{path}: tensor {name!r} holds numbers too large for {_kind(dtype)}")
    return converted


def checked_labels(path: Path, tensors: Params, classes: int) -> Tensor | None:
    """The labels as int64, each one a class; None where the file has none."""
    labels = tensors.get("labels")
    if labels is None:
        return None
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise BadFileError(f"{path}: its labels are of {_kind(labels.dtype)}, not whole numbers")
    if bool(((labels < 0) | (labels >= classes)).any()):
        raise BadFileError(f"{path}: its labels are not all from 0 to {classes - 1}, the classes of its domain")
    return labels.long()


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
