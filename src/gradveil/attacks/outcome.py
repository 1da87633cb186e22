"""What the phases of a search come to, and the best picture of them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.attacks.engine import Given
from gradveil.attacks.parts.priors import Prior
from gradveil.attacks.parts.search import Found


@dataclass(frozen=True)
class Outcome:
    """What a phase came to, for all problems: the next phase starts from it."""

    prior: Prior
    given: Given
    found: Found


@dataclass(frozen=True)
class Pictures:
    """What the phases so far came to: for each problem the best picture, and the trace through all of them."""

    inputs: Tensor
    """[N, B, C, H, W]."""
    labels: Tensor
    objectives: Tensor
    stopped: tuple[str, ...]
    steps: tuple[int, ...]
    trace: Tensor
    strategy: str


def pictures_of(outcome: Outcome, strategy: str) -> Pictures:
    """The outcome of one phase as pictures."""
    found = outcome.found
    searched = found.unknowns.get("labels")
    return Pictures(
        inputs=vmap(outcome.prior.decode)(found.unknowns, outcome.given),
        labels=outcome.given["labels"] if searched is None else searched.argmax(dim=-1),
        objectives=found.objectives,
        stopped=found.stopped,
        steps=found.steps,
        trace=found.trace,
        strategy=strategy,
    )


def better(before: Pictures | None, after: Pictures) -> Pictures:
    """For each problem the picture of the phase with the lower objective."""
    if before is None:
        return after
    later = after.objectives < before.objectives
    return Pictures(
        inputs=torch.where(later.view(-1, 1, 1, 1, 1), after.inputs, before.inputs),
        labels=torch.where(later.view(-1, 1), after.labels, before.labels),
        objectives=torch.where(later, after.objectives, before.objectives),
        stopped=tuple(b if use else a for a, b, use in zip(before.stopped, after.stopped, later, strict=True)),
        steps=before.steps + tuple(before.steps[-1] + step for step in after.steps),
        trace=torch.cat([before.trace, after.trace]),
        strategy=f"{before.strategy}; {after.strategy}",
    )
