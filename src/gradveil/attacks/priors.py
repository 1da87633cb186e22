"""Where reconstructions come from: the unknowns of a search and how they decode to pictures."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gradveil.core.types import Domain, Params


class Prior(Protocol):
    """The unknowns of one problem: where they start, what they decode to, and their valid set."""

    def start(self, batch_size: int, rng: torch.Generator) -> Params: ...

    def decode(self, unknowns: Params) -> Tensor: ...

    def project(self, unknowns: Params) -> Params: ...


class Pixels:
    """The picture itself is unknown, in units of the domain's mean and deviation, so that steps fit any data set.

    ``free`` pixels are raw values that may leave [0, 1] on the way, as in DLG.
    """

    def __init__(self, domain: Domain, device: torch.device | str, *, free: bool = False) -> None:
        self.domain, self.free = domain, free
        mean, std = ((0.0,), (1.0,)) if free else (domain.mean, domain.std)
        self.mean = torch.tensor(mean, device=device).view(-1, 1, 1)
        self.std = torch.tensor(std, device=device).view(-1, 1, 1)

    def start(self, batch_size: int, rng: torch.Generator) -> Params:
        """Independent N(0, 1) entries, drawn on the CPU so that a seed means the same picture on every device."""
        drawn = torch.randn((batch_size, *self.domain.shape), generator=rng)
        return {"pixels": drawn.to(self.mean.device)}

    def decode(self, unknowns: Params) -> Tensor:
        """[..., C, H, W] of inputs."""
        return self.mean + self.std * unknowns["pixels"]

    def project(self, unknowns: Params) -> Params:
        """The nearest unknowns that decode into [0, 1]; those that are not pixels as they are."""
        if self.free:
            return unknowns
        low, high = -self.mean / self.std, (1 - self.mean) / self.std
        return {**unknowns, "pixels": unknowns["pixels"].clamp(low, high)}
