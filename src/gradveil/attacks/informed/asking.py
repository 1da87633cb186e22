"""Asking again: what several replies of one client to the same broadcast say together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.counter import ByData
from gradveil.core.trees import map_each, stack
from gradveil.core.types import Params
from gradveil.threat.observation import Observation


def replies(one: Observation) -> Params:
    """All replies to this broadcast, [R, ...] by name, the last one last."""
    same = [other.reply for other in one.earlier if _equal(other.sent, one.sent)]
    return stack([*same, one.reply])


def count(one: Observation) -> int:
    """How many replies to this broadcast there are."""
    return len(next(iter(replies(one).values())))


@dataclass(frozen=True)
class Together(ByData):
    """One reply made of all: ``reduce`` takes a tensor of all replies [R, ...] to one [...]."""

    reduce: Callable[[Tensor], Tensor]

    def observed(self, one: Observation) -> Observation:
        """In the place of every reply, so that who reduces them once more, for another link, finds the same."""
        reply = map_each(self.reduce, replies(one))
        earlier = [replace(other, reply=reply) if _equal(other.sent, one.sent) else other for other in one.earlier]
        return replace(one, reply=reply, earlier=tuple(earlier))


def mean(tensors: Tensor) -> Tensor:
    """What noise averages out of."""
    return tensors.mean(dim=0)


def most_frequent(tensors: Tensor) -> Tensor:
    """By entry a value that came twice, which only one without noise does; else the mean."""
    if len(tensors) < 2:
        return tensors[0]
    ordered = tensors.sort(dim=0).values
    twice = ordered[1:] == ordered[:-1]
    exact = ordered[:-1].gather(0, twice.to(torch.uint8).argmax(dim=0, keepdim=True))[0]
    return torch.where(twice.any(dim=0), exact, tensors.mean(dim=0))


def _equal(a: Params, b: Params) -> bool:
    return a is b or (a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items()))
