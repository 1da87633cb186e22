"""Additive noise on every entry of every gradient. Without a bound on the gradient this is not differential privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gradveil.core.streams import Kind, Stream
from gradveil.core.types import Params
from gradveil.defenses.base import DEFENSES, At, Log, Transform


@DEFENSES.register("noise")
@dataclass(frozen=True, kw_only=True)
class Noise(Transform):
    """Gaussian or Laplace noise of deviation sigma, or of another size by ``unit``, on every gradient entry."""

    sigma: float = 0.1
    kind: Kind = "gaussian"
    at: At = "step"
    unit: Literal["deviation", "variance", "scale"] = "deviation"

    def __post_init__(self) -> None:
        self._require_kinds()
        self._require(0 <= self.sigma < math.inf, "sigma", "at least 0")

    @property
    def deviation(self) -> float:
        """The standard deviation. The scale of Laplace noise, a mean distance from 0, is a root of 2 times smaller."""
        if self.unit == "variance":
            return math.sqrt(self.sigma)
        return self.sigma * (math.sqrt(2) if self.unit == "scale" and self.kind == "laplace" else 1)

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return rng.noised(tree, self.deviation, self.kind)
