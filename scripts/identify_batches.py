"""How many images of a batch are ranked among the first 8 of 100; one JSON object a line. See docs/attacks/identify.md.

    python scripts/identify_batches.py --defense graddefense --defense dcs2:iterations=100

Twelve disjoint batches of 8 of the CIFAR-10 samples, three under each of four draws of the model's weights. ``--seed``
draws who is in which batch, and is the first of the four seeds of weights and defense.
"""

from __future__ import annotations

import argparse
import json

import torch

from gradveil import models
from gradveil.attacks.identify import Identify
from gradveil.attacks.parts.channel import Span
from gradveil.attacks.parts.likelihood import Angle, InputSpan, Likelihood
from gradveil.auditing.scoring import ranked
from gradveil.client import SimulatedClient
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, PublicData
from gradveil.models import classifier
from gradveil.threat import Observation, observe, threat_model

DATA, SIZE, SEEDS, EACH = load("cifar10-samples"), 8, 4, 3


class BySpan(Identify):
    def likelihood(self, one: Observation) -> Likelihood:
        return InputSpan(span=Span(f"{classifier(one.module, one.domain)}.weight", SIZE))


class ByAngle(Identify):
    def likelihood(self, _: Observation) -> Likelihood:
        return Angle()


WAYS: dict[str, Identify] = {"angle": ByAngle(), "span": BySpan(), "identify": Identify()}


def replies(model: str, defense: str, seed: int, private: torch.Tensor) -> list[Observation]:
    """What is seen of a client with this defense, for each batch of ``private``, places in the data."""
    guard, threat = DEFENSES.build(defense), threat_model("D")
    module = guard.on_model(models.build(model, DATA.domain, seed=seed))
    client = SimulatedClient(module, recipe=Recipe(), defense=guard, public=PublicData(DATA.batch(private).inputs))
    sent = client.model.params
    batches = [DATA.batch(part) for part in private.split(SIZE)]
    return [
        observe(
            module=module, model=model, domain=DATA.domain, sent=sent, batch=batch, recipe=Recipe(), defense=defense,
            reply=client.reply(sent, batch, Stream.seeded(seed, "defense", i)).update, threat=threat, candidates=DATA,
        )
        for i, batch in enumerate(batches)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lenet:init=wide")
    parser.add_argument("--defense", action="append", default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    order = torch.randperm(len(DATA), generator=generator(options.seed, "batches"))
    for defense in options.defense or ["none"]:
        shares: dict[str, list[float]] = {way: [] for way in WAYS}
        for i in range(SEEDS):
            private = order[i * SIZE * EACH : (i + 1) * SIZE * EACH]
            seen = replies(options.model, defense, options.seed + i, private)
            for way, attack in WAYS.items():
                found = attack(seen, seeds=[0] * len(seen))
                shares[way].append(ranked(found, private, DATA).ranked_first or 0.0)
        means = {way: round(sum(each) / SEEDS, 3) for way, each in shares.items()}
        row = {"model": options.model, "defense": defense, "images": SEEDS * SIZE * EACH, **means, "by_seed": shares}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
