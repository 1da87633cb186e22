"""The rounds of a client: what it replies in a later one, and in which rounds an audit has to look at it.

A defense may have a schedule (nothing in the first rounds, noise that fades) or a memory (what it did not send yet).
A look at the first round alone says nothing about those that follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradveil.client.client import Reply, SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Params
from gradveil.defenses import can_remember, fresh, links_of

LATER, LATE = (2, 3, 10), 100
"""Rounds in which a defense is tried; the last only without a memory, because with one all rounds before it count."""
FAR = (10**4, 10**6, 10**9)
"""Rounds in which one is tried that seems to send the same forever."""
SIZES = (1e-6, 1.0, 1e6)
"""How much larger gradients are made to see whether the same is sent for them."""
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


def sends_constant(client: SimulatedClient, sent: Mapping[str, Tensor], batches: Sequence[Batch]) -> bool:
    """Whether the reply is the same, to the last bit, whatever the examples are.

    All batches are tried in the first round; two of them in rounds up to a billion, with gradients a million times
    smaller and larger. It fails closed: the reply of a defense that draws, that changes while it works, or that holds
    anything but plain options, is not constant.
    """
    first: Params | None = None
    later = (1, *LATER, LATE, *FAR, *client.defense.schedule())
    trials = [(batch, 1, 1.0) for batch in batches]
    trials += [(batch, number, size) for number in later for size in SIZES for batch in batches[:2]]
    for batch, number, size in trials:
        alone, rng = copy.copy(client), Stream.seeded(0, "constant")
        alone.defense = fresh(client.defense)
        alone.loss = lambda outputs, targets, size=size: size * client.loss(outputs, targets)  # type: ignore[misc]
        options = [dict(vars(link)) for link in links_of(alone.defense)]
        if not all(isinstance(value, bool | int | float | str | None) for each in options for value in each.values()):
            return False
        own = Batch(batch.inputs.clone(), batch.labels.clone())
        try:
            reply = alone.start(sent, own, rng, round_number=number).finish().update
        except GradveilError:
            return False
        first = reply if first is None else first
        same = reply.keys() == first.keys() and all(torch.equal(tensor, first[name]) for name, tensor in reply.items())
        if rng.draws or not same or [dict(vars(link)) for link in links_of(alone.defense)] != options:
            return False
    return bool(batches)
