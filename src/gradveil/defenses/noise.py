"""Additive noise on every entry of every gradient. Without a bound on the gradient this is not differential privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradveil.core.streams import Kind, Stream
from gradveil.core.types import Params
from gradveil.defenses.base import DEFENSES, At, Log, Transform


@DEFENSES.register("noise")
@dataclass(frozen=True, kw_only=True)
class Noise(Transform):
    """Gaussian or Laplace noise of standard deviation sigma on every gradient entry."""

    sigma: float = 0.1
    kind: Kind = "gaussian"
    at: At = "step"

    def __post_init__(self) -> None:
        self._require(0 <= self.sigma < math.inf, "sigma", "at least 0")

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return rng.noised(tree, self.sigma, self.kind)
