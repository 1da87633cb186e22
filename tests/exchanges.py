"""Small real exchanges for tests: a client with a private image, and what the adversary sees of its reply."""

from __future__ import annotations

from gradveil import models
from gradveil.client import Client
from gradveil.core.seeding import generator
from gradveil.core.types import Batch, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES
from gradveil.threat import Observation, observe, threat_model

SAMPLES = load("cifar10-samples")
FEDSGD = Recipe()


def private_batches(count: int, size: int = 1) -> list[Batch]:
    return [SAMPLES.batch(range(i * size, (i + 1) * size)) for i in range(count)]


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
    client = Client(module, recipe=recipe, defense=guard)
    sent = client.model.params
    return [
        observe(
            module=module,
            model=model,
            domain=SAMPLES.domain,
            sent=sent,
            reply=client.reply(sent, batch, generator(seed, "defense", i)).update,
            batch=batch,
            recipe=recipe,
            defense=defense,
            threat=threat_model(threat),
            candidates=SAMPLES,
        )
        for i, batch in enumerate(batches)
    ]
