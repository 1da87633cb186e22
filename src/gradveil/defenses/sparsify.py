"""Sparsification: only the largest entries of every tensor are sent, the others are zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradveil.core.streams import Stream
from gradveil.core.types import Params
from gradveil.defenses.base import DEFENSES, At, Log, Transform
from gradveil.defenses.outpost import TopKPerLayer


@DEFENSES.register("sparsify")
@dataclass(frozen=True, kw_only=True)
class Sparsify(Transform):
    """Keep the largest entries of each tensor by magnitude; the share ``rate`` of them becomes zero."""

    rate: float = 0.9
    at: At = "step"

    def __post_init__(self) -> None:
        self._require_kinds()
        self._require(0 <= self.rate < 1, "rate", "from 0 to below 1")

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        kept: Params = {}
        for device in {tensor.device for tensor in tree.values()}:
            kept |= kept_largest({name: g for name, g in tree.items() if g.device == device}, self.rate)
        left = sum(int(g.count_nonzero()) for g in kept.values())
        log.add("zeros", 1 - left / max(1, sum(g.numel() for g in kept.values())))
        return {name: kept[name] for name in tree}


def kept_of(entries: int, rate: float) -> int:
    """How many of so many entries are kept: (1 - rate) of them, rounded to the nearest number, and at least one.

    >>> kept_of(300, 0.9), kept_of(12, 0.9), kept_of(3, 0.9)
    (30, 1, 1)
    """
    return min(entries, max(1, round((1 - rate) * entries)))


def kept_largest(tree: Params, rate: float) -> Params:
    """All but the entries of largest magnitude of each tensor at zero; of equal ones the first are kept."""
    sizes = [tensor.numel() for tensor in tree.values()]
    joined = torch.cat([tensor.detach().flatten().abs().float() for tensor in tree.values()])
    (mask,) = TopKPerLayer(sizes, [kept_of(size, rate) for size in sizes])(joined)
    parts = zip(tree.items(), torch.split(mask, sizes), strict=True)
    return {name: torch.where(part.view_as(tensor), tensor, 0.0) for (name, tensor), part in parts}
