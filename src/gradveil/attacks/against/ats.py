"""Against ATS: the picture that was trained on is found first, then the one that a policy made it from.

Every outcome of the policies is tried: a picture is searched that the outcome takes to the one that was found. Black
borders and clipped levels make only the outcome that was drawn, or one like it, succeed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from gradveil.attacks.base import Reconstruction
from gradveil.attacks.parts.channel import Channel
from gradveil.attacks.parts.counter import CounterMove, against
from gradveil.defenses.ats import ATS, KINDS, LIBRARY, Policy, transformed
from gradveil.domains import total_variation
from gradveil.threat.observation import Observation

_STEPS = 150
_RATE = 0.05
_SMOOTH = 0.01
_BY_LEVELS = ("equalize", "posterize")
"""Operations that no search can follow backwards."""


@dataclass(frozen=True)
class UndoPolicies(CounterMove):
    """Take what was found for the transformed pictures, and return what they were transformed from."""

    policies: tuple[Policy, ...]

    def kind(self) -> None:
        """It is all in what is made of the pictures: the search does not have to know it."""

    def finish(self, found: Reconstruction, one: Observation) -> Reconstruction:  # noqa: ARG002
        tried = [undone(found.inputs, policy) for policy in self.policies]
        pictures, residuals = (torch.cat(parts) for parts in zip(*tried, strict=True))
        best = residuals.argmin(dim=0)
        return replace(found, inputs=pictures[best, torch.arange(len(best))])


def counter_move(defense: ATS, _: Observation) -> CounterMove | None:
    by_levels = any(LIBRARY[number][0] in _BY_LEVELS for policy in defense.policies for number in policy)
    return None if by_levels or defense.crop else UndoPolicies(defense.policies)


@against(
    "ats",
    sentence="It tries to undo every outcome of the policies and keeps the one that explains the picture.",
    counter_move=counter_move,
    after_steps=True,
)
def channel(_defense: ATS, _: Observation) -> Channel:
    """The gradient is sent as it is, of other pictures."""
    return Channel()


def undone(pictures: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """Smooth pictures [outcomes, n, C, H, W] that each outcome takes nearest to ``pictures``, and how near, [., n]."""
    signed = (KINDS[LIBRARY[number][0]].signed for number in policy)
    signs = torch.tensor(list(product(*((1, -1) if each else (1,) for each in signed))))  # all that may have been drawn
    each, wanted = signs.repeat_interleave(len(pictures), dim=0), pictures.repeat(len(signs), 1, 1, 1)
    before = torch.full_like(wanted, 0.5).requires_grad_()
    adam = torch.optim.Adam([before], lr=_RATE)

    def away() -> Tensor:
        return (transformed(before, policy, each) - wanted).square().mean(dim=(1, 2, 3))

    for _ in range(_STEPS):
        total = away().sum() + _SMOOTH * len(wanted) * total_variation(before)
        (before.grad,) = torch.autograd.grad(total, before)
        adam.step()
        with torch.no_grad():
            before.clamp_(0, 1)
    return before.detach().view(len(signs), *pictures.shape), away().detach().view(len(signs), -1)
