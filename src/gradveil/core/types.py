"""The vocabulary of the whole toolkit: named tensors, batches, how a client trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.fields import Json as Json
from gradveil.core.fields import shown

Params = dict[str, Tensor]
"""Tensors by parameter name, never by position: parameters, gradients, updates, noise, masks."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, classes], targets [n] or [n, classes]) -> scalar, averaged over the batch."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The usual loss; takes labels [n] or probabilities [n, classes]."""
    return torch.nn.functional.cross_entropy(outputs, targets)


@dataclass(frozen=True)
class Batch:
    """Examples and their labels: inputs [n, ...] in [0, 1], labels [n] of int64.

    In a client whose model takes several tensors, ``inputs`` is a :class:`gradveil.models.SeveralInputs` of them.
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise GradveilError(f"a batch has {len(self.inputs)} inputs but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.inputs.to(device), self.labels.to(device))

    def take(self, index: Tensor | slice) -> Batch:
        return Batch(self.inputs[index], self.labels[index])


@dataclass(frozen=True)
class Recipe:
    """How a client turns the broadcast into what it sends.

    ``sends="gradient"`` is FedSGD: one gradient over the whole local batch. ``sends="delta"`` is FedAvg: ``epochs``
    passes in mini-batches of ``batch_size`` (None: all at once) of SGD, and the client sends final minus initial
    parameters.
    """

    sends: Literal["gradient", "delta"] = "gradient"
    lr: float = 0.1
    epochs: int = 1
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    train_mode: bool = False

    def __post_init__(self) -> None:
        if self.sends not in ("gradient", "delta"):
            raise GradveilError(f"a client sends 'gradient' or 'delta', not {shown(self.sends)}")
        for name, low in (("lr", 0.0), ("momentum", 0.0), ("weight_decay", 0.0)):
            value = getattr(self, name)
            if not is_number(value) or value < low:
                raise GradveilError(
                    f"a recipe's {name} is a number of at least {low} that a tensor can hold, not {shown(value)}"
                )
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if not (name == "batch_size" and value is None) and (type(value) is not int or value < 1):
                raise GradveilError(f"a recipe's {name} is a whole number of at least 1, not {shown(value)}")
        if self.lr == 0 or type(self.train_mode) is not bool:
            raise GradveilError("a recipe needs a learning rate above 0 and a train_mode that is true or false")
        if self.sends == "gradient" and (self.epochs > 1 or self.batch_size is not None):
            raise GradveilError("several epochs or mini-batches need sends='delta': a gradient is of one step")


def is_number(value: object) -> bool:
    """Whether a tensor can hold it: torch takes no whole number of more than 64 bits."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)
