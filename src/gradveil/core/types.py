"""The vocabulary of the whole toolkit: named tensors, batches, what inputs look like, how a client trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError

Params = dict[str, Tensor]
"""Tensors by parameter name, never by position: parameters, gradients, updates, noise, masks."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, classes], targets [n] or [n, classes]) -> scalar, averaged over the batch."""


@dataclass(frozen=True)
class Batch:
    """Examples and their labels: inputs [n, C, H, W] in [0, 1], labels [n] of int64."""

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
class Domain:
    """What inputs look like: public knowledge, which a model is built for and an adversary may use.

    Inputs are always in [0, 1]; ``mean`` and ``std`` per channel say how a model may normalise them.
    """

    channels: int
    height: int
    width: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.height, self.width)


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
            raise GradveilError(f"a client sends 'gradient' or 'delta', not {self.sends!r}")
        if self.lr <= 0:
            raise GradveilError(f"the learning rate must be above 0, not {self.lr}")
        if self.epochs < 1 or (self.batch_size is not None and self.batch_size < 1):
            raise GradveilError("a recipe needs at least one epoch and mini-batches of at least one example")
        if self.sends == "gradient" and (self.epochs > 1 or self.batch_size is not None):
            raise GradveilError("several epochs or mini-batches need sends='delta': a gradient is of one step")
