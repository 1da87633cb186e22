"""A client under an active attack: it answers whatever the attack crafts, until the attack asks no more."""

from __future__ import annotations

from exchanges import FEDSGD, SAMPLES
from gradveil import models
from gradveil.attacks import Attack, Crafted, Server
from gradveil.attacks.active.interrogation import interrogate
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Recipe
from gradveil.defenses import DEFENSES
from gradveil.threat import Observation, observe, threat_model


def interrogated(
    attack: Attack,
    batch: Batch,
    *,
    model: str,
    defense: str = "none",
    threat: str = "F",
    recipe: Recipe = FEDSGD,
    seed: int = 0,
    public: Batch | None = None,
) -> Observation:
    """What the adversary sees of the client's last reply, with the earlier ones in it."""
    honest = models.build(model, SAMPLES.domain, seed=seed)
    sent = dict(honest.named_parameters())
    server = Server(honest, model, {name: p.detach().clone() for name, p in sent.items()}, SAMPLES.domain, public)

    def answer(crafted: Crafted, question: int) -> Observation:
        client = SimulatedClient(crafted.module, recipe=recipe, defense=DEFENSES.build(defense))
        reply = client.reply(crafted.sent, batch, Stream.seeded(seed, "defense", question))
        return observe(
            module=crafted.module,
            model=crafted.model,
            domain=SAMPLES.domain,
            sent=crafted.sent,
            reply=reply.update,
            batch=batch,
            recipe=recipe,
            defense=defense,
            threat=threat_model(threat),
            crafted=crafted.tampered,
        )

    return interrogate(attack, server, [answer], seed)[0]
