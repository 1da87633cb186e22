"""The rounds of a client: what it replies in a later one, and in which rounds an audit has to look at it.

A defense may have a schedule (nothing in the first rounds, noise that fades) or a memory (what it did not send yet).
A look at the first round alone says nothing about those that follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from gradveil.client.client import Reply, SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Params
from gradveil.defenses import can_remember, fresh

LATER, LATE = (2, 3, 10), 100
"""Rounds in which a defense is tried; the last only without a memory, because with one all rounds before it count."""
SAME = 1e-3
"""Two replies are the same if each tensor differs by no more than this share of its length."""

Streams = Callable[[int], Stream]
"""(the number of a round) -> what one client draws from in it."""


def replies_in_round(
    client: SimulatedClient,
    sent: Mapping[str, Tensor],
    batches: Sequence[Batch],
    streams: Sequence[Streams],
    round_number: int = 1,
) -> list[Reply]:
    """What clients alike reply in a round, each for its own batch and after it has answered the rounds before.

    They get the same broadcast in all rounds. Where a defense can remember, each client has a copy of it: otherwise one
    would answer with what is left of another one's data.
    """
    remembers = can_remember(client.defense)
    if client.defense.batches_clients and not remembers:
        return client.replies(sent, batches, [own(round_number) for own in streams], round_number=round_number)
    found = []
    for batch, own in zip(batches, streams, strict=True):
        alone = copy.copy(client)
        alone.defense = fresh(client.defense)
        for number in range(1 if remembers else round_number, round_number + 1):
            again = Batch(batch.inputs.clone(), batch.labels.clone())  # a defense may edit what it gets
            reply = alone.start(sent, again, own(number), round_number=number).finish()
        found.append(reply)
    return found


def rounds_to_audit(client: SimulatedClient, sent: Mapping[str, Tensor], batch: Batch) -> tuple[int, ...]:
    """The first round, and the later ones in which the defense does something else with the same batch and draws.

    Those are the rounds of its ``schedule``, and a few that are tried with every defense. One that draws from anywhere
    but ``step.rng`` never does the same twice, and is looked at in all of them.
    """

    def update(number: int) -> Params | None:
        try:
            (reply,) = replies_in_round(client, sent, [batch], [lambda _: Stream.seeded(0, "rounds")], number)
        except GradveilError:  # it is raised again by the audit itself, if it comes in a round that is audited
            return None
        return reply.update

    tried = {*LATER, *client.defense.schedule(), *(() if can_remember(client.defense) else (LATE,))}
    first = update(1)
    different = {} if first is None else {1: first}
    for number in sorted(tried - {1}) if different else ():
        reply = update(number)
        if reply is not None and not any(_same(reply, other) for other in different.values()):
            different[number] = reply
    return tuple(different) or (1,)


def _same(one: Params, other: Params) -> bool:
    return all(float((x - other[name]).norm()) <= SAME * float(other[name].norm()) for name, x in one.items())
