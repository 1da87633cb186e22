"""Counter-moves by weights: entries count by how much of them the defense left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.counter import ByData
from gradveil.attacks.engine import Given
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.threat.observation import Observation

_TINY = 1e-30
_DOUBT = 2e4
"""How fast confidence falls with the size of the noise against the gradient: see docs/attacks/informed.md."""
_LEAST_SIGNAL = 0.05
"""The share of a reply's square that is at least taken for gradient."""


@dataclass(frozen=True)
class Without(ByData):
    """Leave a tensor out of the matching."""

    name: str

    def known(self, one: Observation) -> Given:
        return {"weights": {name: torch.full_like(t, float(name != self.name)) for name, t in one.reply.items()}}


class OnlySent(ByData):
    """Leave out the entries that were set to zero."""

    def known(self, one: Observation) -> Given:
        return {"weights": map_each(lambda tensor: (tensor != 0).to(tensor), one.reply)}


@dataclass(frozen=True)
class Noisy(ByData):
    """Noise of known variance in every entry: the more of it, the more the picture itself has to be plausible.

    Where all entries have the same noise, all count the same, as in a likelihood. ``variances`` gives that of every
    entry, by tensor and of its shape; where they differ, parts of a tensor count by their share of signal.
    """

    variances: Callable[[Observation], Params]
    uneven: bool = False

    def known(self, one: Observation) -> Given:
        variances = self.variances(one)
        known: Given = {"confidence": confidence(one.reply, variances)}
        if self.uneven:
            known["weights"] = map_each(signal, one.reply, variances)
        return known


def confidence(reply: Params, variances: Params) -> Tensor:
    """From 1, for no noise, down: a scalar, by the deviation of the noise against the length of the gradient."""
    whole, noise = (
        torch.stack([t.sum() for t in tree.values()]).sum() for tree in (map_each(torch.square, reply), variances)
    )
    entries = sum(t.numel() for t in reply.values())
    gradient = (whole - noise).clamp(min=_LEAST_SIGNAL * float(whole) + _TINY)
    return 1 / (_DOUBT * (noise / entries / gradient).sqrt()).clamp(min=1)


def signal(tensor: Tensor, variances: Tensor) -> Tensor:
    """The share of the square of all entries of like noise that it does not explain (Wiener's rule), by entry."""
    levels, group = torch.unique(variances, return_inverse=True)
    squares, sizes = (
        torch.zeros_like(levels).index_add(0, group.flatten(), part.flatten())
        for part in (tensor.square(), torch.ones_like(tensor))
    )
    share: Tensor = (1 - levels * sizes / (squares + _TINY)).clamp(min=0)
    return share[group]
