"""Additive noise on every entry of every gradient. Without a bound on the gradient this is not differential privacy."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.trees import add, map_each
from gradveil.core.types import Params
from gradveil.defenses.base import Log, Transform
from gradveil.defenses.registry import DEFENSES


@DEFENSES.register("noise")
class Noise(Transform):
    """Gaussian or Laplace noise of standard deviation sigma on every gradient entry."""

    def __init__(
        self,
        *,
        sigma: float = 0.1,
        kind: Literal["gaussian", "laplace"] = "gaussian",
        at: Literal["step", "update"] = "step",
    ) -> None:
        super().__init__(at=at)
        if not 0 <= sigma < math.inf:
            raise GradveilError(f"defense noise: sigma is at least 0, not {sigma}")
        self.sigma = sigma
        self.draw = {"gaussian": _gaussian, "laplace": _laplace}[kind]

    def transform(self, tree: Params, rng: torch.Generator, log: Log) -> Params:  # noqa: ARG002
        return map_each(lambda g: g + self.sigma * self.draw(g, rng), tree)

    def imitated(self, update: Params, drawn: Params) -> Params | None:
        return add(update, drawn, self.sigma)


def _gaussian(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, device=rng.device, dtype=like.dtype).to(like.device)


def _laplace(like: Tensor, rng: torch.Generator) -> Tensor:
    """Of variance 1: a Laplace of scale b has variance 2 b^2. The difference of two exponentials is Laplace."""
    pair = torch.empty((2, *like.shape), device=rng.device, dtype=like.dtype).exponential_(generator=rng)
    return ((pair[0] - pair[1]) / 2**0.5).to(like.device)
