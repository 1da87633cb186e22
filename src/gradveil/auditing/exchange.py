"""The exchange under audit: private batches, clients with a defense, and what the adversary sees of their replies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil import models
from gradveil.attacks import Attack, Crafted, Server
from gradveil.attacks.active.interrogation import Answer, interrogate
from gradveil.auditing.case import Case
from gradveil.client import Reply, SimulatedClient, cross_entropy
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import derive, generator
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Loss, Params
from gradveil.data import ImageSet
from gradveil.defenses import DEFENSES, Log, PublicData
from gradveil.threat import Knowledge, Observation, observe, threat_model

PUBLIC = 1000
"""Examples of the same kind that a server may hold."""


@dataclass(frozen=True)
class Private:
    """The truth: the private examples, where they stand in the data set, and the gallery they hide in."""

    batch: Batch
    index: Tensor
    """[n]: position of each private example in the data set."""
    gallery: Tensor
    """[m, C, H, W]: the private pictures first, then distractors of the same kind."""


def choose_private(data: ImageSet, case: Case) -> Private:
    """The first examples of the data set, or every k-th, and a gallery of others drawn with the case's seed."""
    if (case.images - 1) * case.every >= len(data):
        every = f", every {case.every}th" if case.every > 1 else ""
        raise GradveilError(f"{case.data} has {len(data)} images, too few for {case.images}{every}")
    index = torch.arange(case.images) * case.every
    others = torch.randperm(len(data), generator=generator(case.seed, "gallery"))
    others = others[~torch.isin(others, index)][: max(0, case.gallery - case.images)]
    if len(others) == 0 and case.images < 2:
        raise GradveilError(f"{case.data} is too small to hide a private image in; use a larger data set")
    batch = data.batch(index)
    return Private(batch, index, torch.cat([batch.inputs, data.batch(others).inputs]))


@dataclass(frozen=True)
class Broadcast:
    """What the server sends: an architecture and its parameters. Defenses that share it can be attacked together."""

    module: nn.Module
    sent: Params


def broadcast(case: Case, reshaped: str | None, data: ImageSet, own: nn.Module | None = None) -> Broadcast:
    """The model of the case or the user's own, reshaped by the defenses named where there are any."""
    module = models.build(case.model, data.domain, seed=case.seed) if own is None else copy.deepcopy(own)
    module = (DEFENSES.build(reshaped).on_model(module) if reshaped else module).to(case.device)
    return Broadcast(module, models.trained_parameters(module))


@dataclass(frozen=True)
class Exchange:
    """One defense at work: what was seen of every private batch, and what the defense logged."""

    observations: list[Observation]
    log: Log
    randomized: bool
    """Whether the defense made random draws."""


def exchange(
    case: Case,
    defense_spec: str,
    private: Private,
    data: ImageSet,
    made: Broadcast,
    progress: Progress,
    attack: Attack | None = None,
    loss: Loss = cross_entropy,
) -> Exchange:
    """Let a client with this defense reply for each private batch, and take down what is seen.

    It gets the honest broadcast or, where an attack is named, whatever that crafts from it.
    """
    log, defense, threat = Log(), DEFENSES.build(defense_spec), threat_model(case.threat)
    starts = range(0, case.images, case.batch_size)
    batches = [private.batch.take(slice(start, start + case.batch_size)).to(case.device) for start in starts]
    drew: list[bool] = []
    public = PublicData(private.batch.inputs)

    def answers(got: Crafted, numbers: Sequence[int], question: int = 0) -> list[Observation]:
        """What is seen of the clients of these numbers when they get this broadcast."""
        again = [question] if question else []
        rngs = [Stream.seeded(case.seed, "defense", defense_spec, number, *again) for number in numbers]
        client = SimulatedClient(got.module, recipe=case.recipe, defense=defense, loss=loss, public=public)
        replies = client.replies(got.sent, [batches[number] for number in numbers], rngs)
        drew.extend(rng.draws > 0 for rng in rngs)
        task.advance(len(numbers))
        return [seen(got, batches[number], reply) for number, reply in zip(numbers, replies, strict=True)]

    def seen(got: Crafted, batch: Batch, reply: Reply) -> Observation:
        log.merge(reply.log)
        return observe(
            module=got.module,
            model=got.model,
            domain=data.domain,
            sent=got.sent,
            reply=reply.update,
            batch=batch,
            recipe=case.recipe,
            defense=defense_spec,
            threat=threat,
            crafted=got.tampered,
            candidates=data,
            loss=loss,
        )

    def client(number: int) -> Answer:
        return lambda got, question: answers(got, [number], question)[0]

    count = len(batches) if attack is None else None
    with progress.task(f"clients with {defense_spec}", count, "replies") as task:
        if attack is None:
            honest = Crafted(made.module, case.model, made.sent, ())
            return Exchange(answers(honest, range(len(batches))), log, any(drew))
        known = public.last(data, PUBLIC) if Knowledge.PUBLIC_DATA in threat.knows else None
        server = Server(made.module, case.model, made.sent, data.domain, known)
        asked = interrogate(attack, server, [client(i) for i in range(len(batches))], derive(case.seed, "craft"))
        return Exchange(asked, log, any(drew))
