"""What attacks, audits and reports ask of private data, whatever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Domain(ABC):
    """What inputs look like: public knowledge, which a model is built for and an adversary may use.

    Subclasses are frozen dataclasses, and their fields are what is saved of a domain. Inputs are [n, *shape], and
    every number in them is in [0, 1].
    """

    kind: ClassVar[str]
    """The name of this kind of data in files."""
    classes: int

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""

    @abstractmethod
    def moments(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mean and the standard deviation of inputs, each in a shape that broadcasts over an example."""

    @abstractmethod
    def probes(self, count: int, rng: torch.Generator) -> Tensor:
        """Random inputs that have the mean and the deviation of private ones, every number drawn alone."""

    @abstractmethod
    def stand_ins(self, count: int, rng: torch.Generator) -> Tensor:
        """Random inputs that look like private ones to a network: neighboring numbers are alike."""

    @abstractmethod
    def spread_along(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the standard deviation of the products of inputs with a direction [*shape], as far as the
        domain alone tells.
        """

    @abstractmethod
    def roughness(self, inputs: Tensor) -> Tensor:
        """How much neighboring numbers differ, a scalar: small for natural inputs [..., *shape]."""

    @abstractmethod
    def energy(self, inputs: Tensor) -> Tensor:
        """The squared distance to blank inputs, a scalar."""

    @abstractmethod
    def blank(self, count: int) -> Tensor:
        """Inputs that show nothing."""

    @abstractmethod
    def valid(self, inputs: Tensor) -> Tensor:
        """The nearest inputs that private data may be, blank where an entry is no number."""

    @abstractmethod
    def fault(self, inputs: Tensor) -> str | None:
        """Why these inputs [n, ...] cannot be private data: what they are instead. None if they can."""

    @abstractmethod
    def show(self, inputs: Tensor) -> bytes:
        """Inputs [n, *shape] side by side as one PNG file."""
