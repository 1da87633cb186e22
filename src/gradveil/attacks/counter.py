"""What an attack changes in its matching because it knows the defense."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch.utils._pytree import tree_map

from gradveil.attacks.base import Reconstruction
from gradveil.attacks.engine import Given
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.threat.observation import Observation


class Counter:
    """Changes nothing at any hook; each counter-move overrides one or two."""

    def kind(self) -> Hashable:
        """Problems whose counter-moves are of one kind are searched as one batch."""
        return self

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

    def shown(self, one: Observation) -> Observation:
        """What is left to match once everything else is known: a reply may hold a part of the layers."""
        return one

    def compared(self, update: Params, reply: Params) -> tuple[Params, Params]:
        """What is compared instead of a candidate's update and the reply; differentiable, and safe under vmap."""
        return update, reply

    def revealed(self, found: Reconstruction, one: Observation) -> Reconstruction:  # noqa: ARG002
        """What the pictures that were found say about the private ones."""
        return found


class ByData(Counter):
    """A counter-move that is all in what it sees, gives and reveals: the search does not have to know it."""

    def kind(self) -> Hashable:
        return None


class Counters(Counter):
    """The counter-moves against the links of a chain of defenses, in their order."""

    def __init__(self, moves: Sequence[Counter]) -> None:
        self.moves = tuple(moves)

    def kind(self) -> Hashable:
        return tuple(kind for kind in (move.kind() for move in self.moves) if kind is not None) or None

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

    def shown(self, one: Observation) -> Observation:
        for move in self.moves:
            one = move.shown(one)
        return one

    def compared(self, update: Params, reply: Params) -> tuple[Params, Params]:
        for move in self.moves:
            update, reply = move.compared(update, reply)
        return update, reply

    def revealed(self, found: Reconstruction, one: Observation) -> Reconstruction:
        for move in reversed(self.moves):
            found = move.revealed(found, one)
        return found


class Each(Counter):
    """The counter-moves of a batch of problems, all of one kind, each for its own problem."""

    def __init__(self, moves: Sequence[Counter], seen: Sequence[Observation]) -> None:
        self.first = moves[0]
        left = [move.observed(one) for move, one in zip(moves, seen, strict=True)]
        known = [move.known(one) for move, one in zip(moves, left, strict=True)]
        self.left = [move.shown(one) for move, one in zip(moves, left, strict=True)]
        """What the matching gets to see."""
        named = set().union(*known)
        self._known = {id(one): _whole(one, named) | own for one, own in zip(self.left, known, strict=True)}

    def kind(self) -> Hashable:
        return self.first.kind()

    def known(self, one: Observation) -> Given:
        return self._known[id(one)]

    def compared(self, update: Params, reply: Params) -> tuple[Params, Params]:
        return self.first.compared(update, reply)


def _whole(one: Observation, named: set[str]) -> Given:
    """Weights and confidence where nothing is doubted, as far as they are ``named``."""
    device = next(iter(one.reply.values())).device
    whole: Given = {"weights": map_each(torch.ones_like, one.reply), "confidence": torch.ones((), device=device)}
    return {key: value for key, value in whole.items() if key in named}
