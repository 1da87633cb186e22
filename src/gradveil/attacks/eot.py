"""Expectation over transformation (Athalye et al. 2018): a candidate is judged under many draws of a random defense.

An adversary who knows the defense cannot know what it drew, but can draw as it does: the distance to what was seen is
averaged over such draws, the same ones for all problems and all steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.types import Params
from gradveil.defenses import DEFENSES
from gradveil.threat.observation import Observation

Distance = Callable[[Params], Tensor]


class Averaged:
    """The mean distance over ``count`` draws of the observation's own defense."""

    def __init__(self, one: Observation, count: int) -> None:
        if one.defense is None:
            raise GradveilError(
                "averaging over a defense needs to know it: use a threat model that gives it, such as C"
            )
        self.defense = DEFENSES.build(one.defense)
        rng = generator(0, "eot")
        self.draws = {
            name: torch.randn((count, *tensor.shape), generator=rng).to(tensor) for name, tensor in one.reply.items()
        }
        if self.defense.sample_reply(one.reply, {name: drawn[0] for name, drawn in self.draws.items()}) is None:
            raise GradveilError(
                f"the draws of defense {one.defense!r} cannot be averaged over: those of noise and censor can"
            )

    def __call__(self, update: Params, distance: Distance) -> Tensor:
        def under(drawn: Params) -> Tensor:
            sampled = self.defense.sample_reply(update, drawn)
            assert sampled is not None
            return distance(sampled)

        return vmap(under)(self.draws).mean()
