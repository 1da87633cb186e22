"""GradDefense's slices, computed as the client computes them, and which of them may hold noise."""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.core.streams import Stream
from gradveil.core.trees import map_each
from gradveil.core.types import Batch, Params
from gradveil.defenses import GradDefense, Step
from gradveil.models import Functional
from gradveil.threat.observation import Observation

_HALF_WITHIN = 0.6745
"""Half of all entries of N(0, 1) are smaller than this."""
_CLEARLY = 0.8
"""A slice whose middle entry is below this share of the noise's has no noise."""


def variances(defense: GradDefense, one: Observation, replies: int) -> Params:
    """The variance of the noise in each entry: that of a mean of replies where a slice is as wide as that, else 0."""
    where, sigma = slices_of(defense, one), defense.sigma / replies**0.5
    noisy = torch.stack([_as_wide(one.reply, where, number, sigma) for number in range(defense.slices)])
    return map_each(lambda index: sigma**2 * noisy[index.long()].float(), where)


def _as_wide(reply: Params, where: Params, number: int, sigma: float) -> Tensor:
    inside = torch.cat([tensor[where[name] == number] for name, tensor in reply.items()])
    return inside.abs().median() >= _CLEARLY * _HALF_WITHIN * sigma


def slices_of(defense: GradDefense, one: Observation) -> Params:
    """The slice of every entry, as the client computes it before its first step."""
    return defense.slices_of(_start(one))


def _start(one: Observation) -> Step:
    """That step, with a stand-in for its examples: slices do not depend on them."""
    device = next(iter(one.sent.values())).device
    stand_in = Batch(
        torch.full((1, *one.domain.shape), -1.0, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    )
    model = Functional(one.module, train_mode=one.recipe is not None and one.recipe.train_mode)
    rng = Stream.seeded(0, "slices")
    return Step(model=model, loss=one.loss, params=one.sent, batch=stand_in, number=0, lr=0.0, rng=rng)
