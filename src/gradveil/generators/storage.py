"""Generators on disk: weights in half precision, the options that build the architecture, and a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.generators.dcgan import DCGAN

KIND = "generator"
_LARGEST = {"channels": 16, "height": 32, "width": 32, "classes": 10_000, "latent": 4096, "features": 1024, "kernel": 4}


def save_generator(path: Path, model: DCGAN, card: Mapping[str, Any]) -> None:
    """Write a trained generator; ``card`` says what it was trained on, how long, and how good it is."""
    tensors = {name: _halved(name, tensor) for name, tensor in model.state_dict().items()}
    write_tensors(path, KIND, tensors, {"architecture": "dcgan", "options": model.options, "card": dict(card)})


def load_generator(path: Path) -> DCGAN:
    """The generator of a file in eval mode, with its card. Shapes are compared before anything is loaded."""

    def check(meta: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        options = _options(path, meta)
        with torch.device("meta"):
            wanted = {name: tuple(tensor.shape) for name, tensor in DCGAN(**options).state_dict().items()}
        for name in sorted(wanted.keys() | shapes.keys()):
            if wanted.get(name) != shapes.get(name):
                raise BadFileError(f"{path}: tensor {name!r} does not fit the architecture that its header names")

    tensors, meta = read_tensors(path, KIND, check=check)
    model = DCGAN(**meta["options"])
    model.load_state_dict(tensors)
    card = meta.get("card")
    model.card = card if isinstance(card, dict) else {}
    return model.eval().requires_grad_(False)


def _halved(name: str, tensor: Tensor) -> Tensor:
    """Weights in half precision; statistics stay as they are, because their range is wider than their use."""
    return tensor if "running" in name or not tensor.is_floating_point() else tensor.half()


def _options(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """The options of the header, each a whole number within reason: a file is hostile until checked."""
    said = meta.get("options")
    if meta.get("architecture") != "dcgan" or not isinstance(said, dict) or said.keys() != _LARGEST.keys():
        raise BadFileError(f"{path}: its header names no generator that is known here")
    for name, largest in _LARGEST.items():
        value = said[name]
        if not (name == "classes" and value is None) and (type(value) is not int or not 1 <= value <= largest):
            raise BadFileError(f"{path}: its header has an impossible {name!r}")
    try:
        with torch.device("meta"):
            DCGAN(**said)
    except (GradveilError, RuntimeError) as error:
        raise BadFileError(f"{path}: its header is impossible: {error}") from None
    return said
