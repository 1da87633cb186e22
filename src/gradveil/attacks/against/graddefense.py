"""Against GradDefense: its slices follow from public images, so they are computed as the client computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.parts.channel import Channel
from gradveil.attacks.parts.counter import ChannelMove, CounterMove, against, all_replies
from gradveil.core.streams import Stream
from gradveil.core.trees import map_each
from gradveil.core.types import Batch, Params
from gradveil.defenses.base import Step
from gradveil.defenses.graddefense import GradDefense
from gradveil.models import Functional
from gradveil.threat.observation import Observation

_HALF_WITHIN = 0.6745
"""Half of all entries of N(0, 1) are smaller than this."""
_CLEARLY = 0.8
"""A slice whose middle entry is below this share of the noise's has no noise."""


@dataclass(frozen=True)
class SharedValues(ChannelMove):
    """The value that several replies share has no noise; slices that are as wide as the noise may hold it."""

    defense: GradDefense

    @property
    def uneven(self) -> bool:
        return True

    def reduce(self, tensors: Tensor) -> Tensor:
        """By entry a value that came twice, which only one without noise does; else the mean."""
        if len(tensors) < 2:
            return tensors[0]
        ordered = tensors.sort(dim=0).values
        twice = ordered[1:] == ordered[:-1]
        exact = ordered[:-1].gather(0, twice.to(torch.uint8).argmax(dim=0, keepdim=True))[0]
        return torch.where(twice.any(dim=0), exact, tensors.mean(dim=0))

    def variances(self, one: Observation) -> Params:
        """That of a mean of replies where a slice is as wide as that, else 0."""
        where, sigma = slices_of(self.defense, one), self.defense.sigma / len(all_replies(one)) ** 0.5

        def as_wide(number: int) -> Tensor:
            inside = torch.cat([tensor[where[name] == number] for name, tensor in one.reply.items()])
            return inside.abs().median().ge(_CLEARLY * _HALF_WITHIN * sigma)

        noisy = torch.stack([as_wide(number) for number in range(self.defense.slices)])
        return map_each(lambda index: sigma**2 * noisy[index.long()].float(), where)


def counter_move(defense: GradDefense, one: Observation) -> CounterMove | None:
    """None with a bound: drawn slices were scaled then, by what nobody knows."""
    return SharedValues(channel(defense, one), defense) if defense.bound is None else None


@against(
    "graddefense",
    sentence="It computes the slices, takes the value that several replies share, and trusts noisy slices less.",
    counter_move=counter_move,
)
def channel(defense: GradDefense, one: Observation) -> Channel:
    """Noise on slices that are drawn. After several steps they lie elsewhere, and nothing is known."""
    if one.kind != "gradient":
        return Channel()

    def pieces() -> dict[str, list[int]]:
        """How many entries in a row lie in the same slice."""
        where = slices_of(defense, one)
        return {
            name: torch.unique_consecutive(index.flatten(), return_counts=True)[1].tolist()
            for name, index in where.items()
        }

    return Channel(sometimes=defense.sigma**2, pieces=pieces, scaled=defense.bound is not None)


def slices_of(defense: GradDefense, one: Observation) -> Params:
    """The slice of every entry, as the client computes it before its first step.

    A stand-in takes the place of the examples: slices do not depend on them.
    """
    device = next(iter(one.sent.values())).device
    # no picture: a public one would be refused as private
    stand_in = Batch(
        torch.full((1, *one.domain.shape), -1.0, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    )
    model = Functional(one.module, train_mode=one.recipe is not None and one.recipe.train_mode)
    rng = Stream.seeded(0, "slices")
    return defense.slices_of(
        Step(model=model, loss=one.loss, params=one.sent, batch=stand_in, number=0, lr=0.0, rng=rng)
    )
