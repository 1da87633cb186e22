"""Quantisation: every entry is sent as one of few levels, drawn so that it is right on average (QSGD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.streams import Stream
from gradveil.core.types import Params
from gradveil.defenses.base import DEFENSES, At, Log, Transform


@DEFENSES.register("quantise")
@dataclass(frozen=True, kw_only=True)
class Quantise(Transform):
    """QSGD (Alistarh et al., NeurIPS 2017): signs and ``levels`` multiples of each tensor's norm, rounded by chance."""

    levels: int = 4
    at: At = "step"

    def __post_init__(self) -> None:
        self._require(type(self.levels) is int and 1 <= self.levels <= 2**16, "levels", "from 1 to 65536")

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:
        sent = {name: self.rounded(tensor, rng) for name, tensor in tree.items()}
        zeros = sum(int((tensor == 0).sum()) for tensor in sent.values())
        log.add("zeros", zeros / max(1, sum(tensor.numel() for tensor in sent.values())))
        return sent

    def rounded(self, tensor: Tensor, rng: Stream) -> Tensor:
        """Up to the next multiple of norm / levels with the chance that makes the mean right, else down."""
        norm = torch.linalg.vector_norm(tensor)
        if float(norm) == 0:
            return tensor
        exact = tensor.abs() / norm * self.levels
        below = exact.floor()
        up = rng.uniform(tensor.shape, tensor) < exact - below
        sent: Tensor = tensor.sign() * (below + up) * (norm / self.levels)
        return sent
