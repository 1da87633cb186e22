"""The rounds of a client: what it replies in a later one, and in which rounds an audit has to look at it.

A defense may have a schedule (nothing in the first rounds, noise that fades) or a memory (what it did not send yet).
A look at the first round alone says nothing about those that follow.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType

import torch
from torch import Tensor

from gradveil.client.client import Reply, SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import detached
from gradveil.core.types import Batch, Params
from gradveil.defenses import Defense, can_remember, fresh, links_of

LATER, LATE = (2, 3, 10), (100, math.lcm(*range(1, 17)))
"""Rounds in which a defense is tried. The late ones only without a memory, because with one all rounds before them
count; what happens every so many rounds, up to sixteen, happens in the last."""
EARLY, FAR = range(1, 61), (*LATE, 10**4, 10**6, 10**9, math.lcm(*range(1, 61)))
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

    tried = {*LATER, *client.defense.schedule(), *(() if can_remember(client.defense) else LATE)}
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

    All batches are tried in the first round. Two of them are tried in the first sixty rounds and in some far away; and,
    in the first round and far away, with gradients a million times smaller and larger, and on four models: this one,
    one with its weights in another order, one with larger weights, and one that is right about the two. The rounds of a
    federation are counted for one of the two. It fails closed: the reply of a defense that draws, that changes while it
    works, or that holds anything but plain options, is not constant.
    """
    two, far = batches[:2], (1, *FAR, *client.defense.schedule())
    trials = [(0, batch, 1, 1.0) for batch in batches]
    trials += [(0, batch, number, 1.0) for number in EARLY for batch in two]
    trials += [(model, batch, number, size) for model in range(4) for number in far for size in SIZES for batch in two]
    broadcasts, first = [dict(sent)], dict[int, list[object]]()
    for place, (model, batch, number, size) in enumerate(trials):
        if model == len(broadcasts):
            broadcasts = _other_models(client, sent, two)
        alone, rng = copy.copy(client), Stream.seeded(0, "constant")
        alone.defense = fresh(client.defense)
        alone.loss = lambda outputs, targets, size=size: size * client.loss(outputs, targets)  # type: ignore[misc]
        options = _options(alone.defense)
        own = Batch(batch.inputs.clone(), batch.labels.clone())
        rounds = {"round_number": number, "federation_round": number if place % 2 else None}
        try:
            reply = alone.start(detached(broadcasts[model]), own, rng, **rounds).finish().update  # type: ignore[arg-type]
        except GradveilError:
            return False
        changed = options is None or _options(alone.defense) != options
        if changed or rng.draws or _bits(reply) != first.setdefault(model, _bits(reply)):
            return False
    return bool(batches)


def _other_models(client: SimulatedClient, sent: Mapping[str, Tensor], batches: Sequence[Batch]) -> list[Params]:
    """A model and three others: in another order, ten times as large, and trained until it is right about batches."""
    rng, trained = generator(0, "other models"), {name: t.detach().clone().requires_grad_() for name, t in sent.items()}
    shuffled = {
        name: t.flatten()[torch.randperm(t.numel(), generator=rng).to(t.device)].view_as(t) for name, t in sent.items()
    }
    optimizer = torch.optim.Adam(trained.values(), lr=0.01)
    inputs, labels = (torch.cat([getattr(batch, part) for batch in batches]) for part in ("inputs", "labels"))
    for _ in range(100):
        loss = client.model.loss(client.loss, {**client.model.frozen, **trained}, inputs, labels)
        if loss < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [dict(sent), shuffled, {name: 10 * tensor for name, tensor in sent.items()}, detached(trained)]


def _bits(reply: Params) -> list[object]:
    """All that a reply shows: -0.0 equals 0.0, and so do the same numbers in another order or precision."""
    return [
        (name, tensor.dtype, tensor.stride(), tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, tensor in reply.items()
    ]


def _options(defense: Defense) -> list[object] | None:
    """The options of all links, those of their classes among them; None if something else is among them."""
    found = list[object]()
    for link in links_of(defense):
        own = [kind for kind in type(link).__mro__ if not kind.__module__.startswith(("gradveil.", "abc", "builtins"))]
        tables = [dict(vars(link)), *({k: v for k, v in vars(kind).items() if k[:1] != "_"} for kind in own)]
        values = [
            value for table in tables for value in table.values() if not isinstance(value, FunctionType | property)
        ]
        if not all(isinstance(value, bool | int | float | str | None) for value in values):
            return None
        found.append(tables)
    return found
