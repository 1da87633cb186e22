"""The device that an option names."""

from __future__ import annotations

import torch

from gradveil.core.errors import GradveilError


def checked_device(said: str | None) -> str:
    """``cpu`` or ``cuda``, refused where it is not there; by itself ``cuda`` where there is one."""
    if said is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if said not in ("cpu", "cuda"):
        raise GradveilError(f"device is cpu or cuda, not {said!r}")
    if said == "cuda" and not torch.cuda.is_available():
        raise GradveilError("there is no CUDA device here: leave --device out, or say cpu")
    return said
