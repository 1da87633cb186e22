"""Additive noise on every entry of every gradient. Without a bound on the gradient this is not differential privacy."""

from __future__ import annotations

import math
from typing import Literal

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Kind, Stream
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
        kind: Kind = "gaussian",
        at: Literal["step", "update"] = "step",
    ) -> None:
        super().__init__(at=at)
        if not 0 <= sigma < math.inf:
            raise GradveilError(f"defense noise: sigma is at least 0, not {sigma}")
        self.sigma, self.kind = sigma, kind

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return rng.noised(tree, self.sigma, self.kind)
