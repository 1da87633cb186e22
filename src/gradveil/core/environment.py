"""What numbers depend on besides what was asked for."""

from __future__ import annotations

import platform

import torch

from gradveil import __version__
from gradveil.core.types import Json


def environment(device: str) -> Json:
    """Versions and the machine, as results carry them."""
    return {
        "gradveil": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def is_environment(value: object) -> bool:
    """Whether a value from a file has what :func:`environment` gives."""
    texts = ("gradveil", "python", "torch", "device")
    whole = isinstance(value, dict) and all(isinstance(value.get(name), str) for name in texts)
    return whole and type(value.get("threads")) is int  # type: ignore[attr-defined]
