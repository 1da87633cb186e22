"""Where reconstructions come from: the unknowns of a search and how they decode to pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradveil.attacks.engine import Given
from gradveil.core.types import Domain, Params


class Prior(Protocol):
    """The unknowns of a problem: where they start, what they decode to, how likely they are, and their valid set."""

    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:
        """Starting points [N, ...] of N problems; each generator alone decides its own."""

    def given(self) -> Given:
        """What this prior adds to what is given of each problem, [N, ...]."""

    def decode(self, unknowns: Params, given: Given) -> Tensor:
        """The inputs [B, C, H, W] of one problem; what is given of it may help, such as its labels."""

    def cost(self, unknowns: Params) -> Tensor | None:
        """What these unknowns cost by themselves, a scalar; None for nothing."""

    def project(self, unknowns: Params) -> Params:
        """Unknowns [N, ...] of all problems, brought back into their valid set."""


class Pixels:
    """The picture itself is unknown, in units of the domain's mean and deviation, so that steps fit any data set.

    ``free`` pixels are raw values that may leave [0, 1] on the way, as in DLG.
    """

    def __init__(self, domain: Domain, device: torch.device | str, *, free: bool = False) -> None:
        self.domain, self.free = domain, free
        mean, std = ((0.0,), (1.0,)) if free else (domain.mean, domain.std)
        self.mean = torch.tensor(mean, device=device).view(-1, 1, 1)
        self.std = torch.tensor(std, device=device).view(-1, 1, 1)

    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:
        return {"pixels": gaussian(rngs, (batch_size, *self.domain.shape)).to(self.mean.device)}

    def given(self) -> Given:
        return {}

    def decode(self, unknowns: Params, given: Given) -> Tensor:  # noqa: ARG002
        return self.mean + self.std * unknowns["pixels"]

    def cost(self, unknowns: Params) -> Tensor | None:  # noqa: ARG002
        return None

    def project(self, unknowns: Params) -> Params:
        """The nearest unknowns that decode into [0, 1]; those that are not pixels as they are."""
        if self.free:
            return unknowns
        low, high = -self.mean / self.std, (1 - self.mean) / self.std
        return {**unknowns, "pixels": unknowns["pixels"].clamp(low, high)}


def gaussian(rngs: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """Independent N(0, 1) entries [N, *shape], drawn on the CPU so that a seed means the same on every device."""
    return torch.stack([torch.randn(shape, generator=rng) for rng in rngs])
