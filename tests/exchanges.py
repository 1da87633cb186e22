"""Small real exchanges for tests: a client with a private image, and what the adversary sees of its reply."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from gradveil import models
from gradveil.client import SimulatedClient, replies_in_round
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Recipe
from gradveil.data import ImageSet, load
from gradveil.defenses import DEFENSES, Defense
from gradveil.threat import Observation, observe, threat_model

SAMPLES = load("cifar10-samples")
PUBLIC = replace(
    SAMPLES,
    name="stand-ins",
    images=SAMPLES.domain.stand_ins(2000, torch.Generator().manual_seed(0)),  # type: ignore[call-arg]
    labels=torch.arange(2000) % 10,
)
"""Public images that need no download."""
FEDSGD = Recipe()


def private_batches(count: int, size: int = 1) -> list[Batch]:
    """The first samples, ``size`` behind each update, in the precision that models are built in at the moment."""
    batches = [SAMPLES.batch(range(i * size, (i + 1) * size)) for i in range(count)]
    return [Batch(batch.inputs.to(torch.get_default_dtype()), batch.labels) for batch in batches]


def observed(
    batches: list[Batch],
    *,
    model: str = "lenet:init=wide",
    defense: str = "none",
    threat: str = "C",
    recipe: Recipe = FEDSGD,
    seed: int = 0,
) -> list[Observation]:
    """What the adversary sees when a client of this kind replies for each batch."""
    guard = DEFENSES.build(defense)
    module = guard.on_model(models.build(model, SAMPLES.domain, seed=seed))
    client = SimulatedClient(module, recipe=recipe, defense=guard)
    sent = client.model.params
    return [
        observe(
            module=module,
            model=model,
            domain=SAMPLES.domain,
            sent=sent,
            reply=client.reply(sent, batch, Stream.seeded(seed, "defense", i)).update,
            batch=batch,
            recipe=recipe,
            defense=defense,
            threat=threat_model(threat),
            candidates=SAMPLES,
            public=lambda spec: PUBLIC,  # noqa: ARG005
        )
        for i, batch in enumerate(batches)
    ]


def observed_through(
    defense: Defense,
    data: ImageSet,
    public: ImageSet | None = None,
    *,
    images: int,
    batch_size: int = 1,
    recipe: Recipe = FEDSGD,
    round_number: int = 1,
) -> list[Observation]:
    """What an adversary who can run the defense sees of clients with the first images of a set, which is its list."""
    module = defense.on_model(models.build("lenet:init=wide", data.domain, seed=0))
    sent = models.trained_parameters(module)
    client = SimulatedClient(module, recipe=recipe, defense=defense)
    batches = [data.batch(range(start, start + batch_size)) for start in range(0, images, batch_size)]
    streams = [partial(Stream.seeded, 1, "client", number) for number in range(len(batches))]
    return [
        observe(
            module=module,
            model="lenet:init=wide",
            domain=data.domain,
            sent=sent,
            reply=reply.update,
            batch=batch,
            recipe=recipe,
            defense=DEFENSES.describe(defense),
            built_defense=defense,
            candidates=data,
            public=None if public is None else lambda spec: public,  # noqa: ARG005
            threat=threat_model("D"),
            round_number=round_number,
        )
        for batch, reply in zip(batches, replies_in_round(client, sent, batches, streams, round_number), strict=True)
    ]
