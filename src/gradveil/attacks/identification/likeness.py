"""Ways to rank candidates by how well their own update explains what was seen; lower is better."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradveil.attacks.identification.comparison import Comparison, Layout, Replies
from gradveil.core.types import Params

ROUNDING = 1e-4
"""How far, as a share of its length, a tensor may be from a candidate's that explains it: rounding, other kernels."""
ROUGHLY = 1e-2
"""The same for several steps, whose rounding adds up and whose defense is not repeated."""
TINY = 1e-60
"""Stands for smaller squares when one is divided by."""


Per = Literal["layer", "global"]
"""What is clipped: each tensor, or all together."""

Scores = Callable[[Params], Tensor]
"""Updates of candidates [c, ...] by name -> how badly each explains each reply, [c, N]."""


class Likeness(Protocol):
    """A way to rank."""

    def against(self, replies: Sequence[Params]) -> Scores:
        """How candidates are scored against these N replies."""


@runtime_checkable
class OfAll(Likeness, Protocol):
    """One that can say nothing of a candidate before it has seen all: its scores are numbers of each, for later."""

    def settled(self, numbers: Tensor, replies: Sequence[Params]) -> Tensor:
        """[N, candidates]: how badly each candidate explains each reply, from the numbers [candidates, n] of all."""


@dataclass(frozen=True, kw_only=True)
class ByTensor:
    """A likeness that a few numbers of each tensor decide."""

    layout: Layout = field(default_factory=Layout)

    def against(self, replies: Sequence[Params]) -> Scores:
        laid_out = Replies(replies, self.layout)
        return lambda updates: self(laid_out.beside(updates))

    @abstractmethod
    def __call__(self, compared: Comparison) -> Tensor:
        """How badly each candidate explains each reply, [c, N]."""


@dataclass(frozen=True, kw_only=True)
class Angle(ByTensor):
    """One minus the cosine of the two updates, all tensors as one vector: right for any defense, best for few."""

    def __call__(self, compared: Comparison) -> Tensor:
        whole = compared.whole()
        return (1 - whole.products / (whole.within * whole.seen + TINY).sqrt())[0]


@dataclass(frozen=True, kw_only=True)
class Directions(ByTensor):
    """How unlikely the reply is if each tensor is the candidate's, scaled and with Gaussian noise, both unknown.

    For a sum of several steps, each of which a defense changed by itself: what is left of a tensor beside the direction
    of the candidate's is an estimate of its noise.
    """

    def __call__(self, compared: Comparison) -> Tensor:
        along = (compared.products.square() / (compared.within * compared.seen + TINY)).clamp(max=1)
        left = 1 - along + ROUGHLY**2
        return (compared.sizes * left.log()).sum(dim=0) / compared.sizes.sum()


@dataclass(frozen=True, kw_only=True)
class Distance(ByTensor):
    """How unlikely the reply is if it is the candidate's update, clipped, in part not sent, and with Gaussian noise.

    A likelihood: tensor by tensor the squared distance over the variance of the noise. Where the noise may or may not
    have been added, the more likely of the two counts.
    """

    bound: float | None = None
    per: Per = "layer"
    variance: float = 0.0
    """Of the noise on every entry."""
    more: Mapping[str, float] = field(default_factory=dict)
    """More variance, by tensor."""
    sometimes: float = 0.0
    """More variance, on some pieces that the adversary does not know."""

    def __call__(self, compared: Comparison) -> Tensor:
        shrunk = shrinkage(compared, self.bound, self.per)
        away = shrunk.square() * compared.within - 2 * shrunk * compared.products + compared.seen
        more = torch.tensor([self.more.get(name, 0.0) for name in compared.names]).to(away).view(-1, 1, 1)
        least = self.variance + more + ROUNDING**2 * compared.seen / compared.sizes + TINY
        fits = [_unlikely(away.clamp(min=0), least + extra, compared.sizes) for extra in {self.sometimes, 0.0}]
        scores = torch.stack(fits).amin(dim=0)
        if self.layout.largest:
            scores = scores + _not_largest(compared)
        return scores.sum(dim=0) / compared.sizes.sum()


def shrinkage(compared: Comparison, bound: float | None, per: Per) -> Tensor:
    """By how much clipping would have scaled each piece of a candidate, [T, c, 1] or [1, c, 1]."""
    squares = compared.squares.sum(dim=0, keepdim=True) if per == "global" else compared.squares
    longest = float("inf") if bound is None else bound
    return (longest / (squares + TINY).sqrt()).clamp(max=1)


def _unlikely(away: Tensor, variance: Tensor, sizes: Tensor) -> Tensor:
    """Minus twice the log of the density of independent Gaussian entries, up to a constant."""
    return away / variance + sizes * variance.log()


def _not_largest(compared: Comparison) -> Tensor:
    """How much larger entries the candidate has than those that were sent, in units of rounding."""
    missing = (1 - compared.within / (compared.most + TINY)).clamp(min=0)
    return compared.sizes * missing / ROUNDING
