"""What an attack changes in its matching because it knows the defense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_map

from gradveil.attacks.base import Reconstruction
from gradveil.attacks.engine import Given
from gradveil.core.types import Params
from gradveil.threat.observation import Observation

if TYPE_CHECKING:
    from gradveil.attacks.matching import Matching


class Counter:
    """Changes nothing at any hook; each counter-move overrides one or two."""

    def observed(self, one: Observation) -> Observation:
        """What the matching gets to see instead, such as the mean of several replies."""
        return one

    def known(self, one: Observation) -> Given:  # noqa: ARG002
        """What is known of one problem beyond its reply.

        ``weights`` by tensor and of its shape say how much its entries count; ``confidence`` multiplies the distance,
        so that below 1 a plausible picture counts for more; ``buffers`` by name replace those of the model; ``targets``
        [B, classes] replace the labels.
        """
        return {}

    def compared(self, update: Params, reply: Params) -> tuple[Params, Params]:
        """What is compared instead of a candidate's update and the reply; differentiable, and safe under vmap."""
        return update, reply

    def adapted(self, attack: Matching) -> Matching:
        """The search that suits what is left of the update, such as one with another objective."""
        return attack

    def revealed(self, found: Reconstruction, one: Observation) -> Reconstruction:  # noqa: ARG002
        """What the pictures that were found say about the private ones."""
        return found


class Counters(Counter):
    """The counter-moves against the links of a chain of defenses, in their order."""

    def __init__(self, moves: Sequence[Counter]) -> None:
        self.moves = tuple(moves)

    def observed(self, one: Observation) -> Observation:
        for move in self.moves:
            one = move.observed(one)
        return one

    def known(self, one: Observation) -> Given:
        """Weights and confidences of several moves multiply."""
        known: Given = {}
        for more in (move.known(one) for move in self.moves):
            both = {key: tree_map(torch.mul, known[key], more[key]) for key in known.keys() & more.keys()}
            known = {**known, **more, **both}
        return known

    def compared(self, update: Params, reply: Params) -> tuple[Params, Params]:
        for move in self.moves:
            update, reply = move.compared(update, reply)
        return update, reply

    def adapted(self, attack: Matching) -> Matching:
        for move in self.moves:
            attack = move.adapted(attack)
        return attack

    def revealed(self, found: Reconstruction, one: Observation) -> Reconstruction:
        for move in reversed(self.moves):
            found = move.revealed(found, one)
        return found
