"""Clipping by tensor, undone: the direction of each tensor is left, and its length is the candidate's own."""

from __future__ import annotations

from dataclasses import dataclass

from gradveil.attacks.counter import Counter
from gradveil.core.trees import map_each
from gradveil.core.types import Params


@dataclass(frozen=True)
class Unclip(Counter):
    """Each tensor of the reply grows by as much as the client would have shrunk the candidate's.

    To clip the candidate instead would make all tensors equally long, and the matching would forget that those that
    were long by themselves say most.
    """

    bound: float

    def compared(self, update: Params, reply: Params) -> tuple[Params, Params]:
        lengths = map_each(lambda tensor: (tensor.detach().square().sum() + 1e-30).sqrt(), update)
        return update, map_each(lambda t, length: t * (length / self.bound).clamp(min=1), reply, lengths)
