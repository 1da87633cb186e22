"""What the best attack on ``dp`` recognises, beside the ceiling that no attack can pass.

Every example of a shipped set is private in turn, among all of the set as candidates, in several draws of the noise and
of the model. ``identify`` knows the defense and ranks by the exact likelihood.

    python scripts/floor_and_ceiling.py --out docs/results/ceiling.jsonl --page docs/results/ceiling.md
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gradveil import models
from gradveil.attacks.identify import Identify
from gradveil.bounds import ceiling, release_of
from gradveil.client import SimulatedClient
from gradveil.core.seeding import derive, generator
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.data import ImageSet, load
from gradveil.defenses import DP, Ledger
from gradveil.metrics import interval, picks
from gradveil.threat import observe, threat_model

SIGMAS = (0.5, 1.0, 2.0, 4.0)
SETTINGS = (
    ("mnist-samples", "mlp:hidden=32,normalize=true", 1),
    ("mnist-samples", "mlp:hidden=32,normalize=true", 4),
    ("cifar10-samples", "lenet:init=wide", 1),
)
HEAD = """# Measured, and the most that is possible

`dp` bounds what one example can change and adds noise, so that there is a ceiling on what any adversary recognises
([bounds](../verdict.md)). Here is what `identify` reaches, which knows the defense and ranks candidates by the exact
likelihood: each of the 100 shipped examples is private in turn among all 100, with fresh noise and fresh models. The
interval is the exact one by update. No lower end is above its ceiling.

Raw rows: [ceiling.jsonl](ceiling.jsonl). Again: `python scripts/floor_and_ceiling.py`.

| data | model | batch | sigma | examples | recognised | 95% interval | ceiling | reached | chance |
| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |
"""
TAIL = """
An MLP comes near because its gradients of different examples stand at wide angles. Those of a LeNet point almost the
same way for examples of one class, and clipping leaves little else to tell them apart: the ceiling holds for every
model, the worst as well, and is not reached on most.
"""


def row(data: ImageSet, model: str, size: int, sigma: float, draws: int) -> dict[str, float | str | int]:
    """One setting: the share recognised of all examples in all draws."""
    defense, attack, shares = DP(sigma=sigma), Identify(), list[float]()
    for draw in range(draws):
        module = models.build(model, data.domain, seed=draw)
        sent, client = models.trained_parameters(module), SimulatedClient(module, recipe=Recipe(), defense=defense)
        order = torch.randperm(len(data), generator=generator(draw, "order"))
        places = torch.randperm(len(data), generator=generator(draw, "candidates"))
        candidates, seen, own = data.subset(places), [], []
        for number, batch in enumerate(order.split(size)):
            rng = Stream.seeded(draw, "noise", str(sigma), size, number)
            reply = client.reply(sent, data.batch(batch), rng)
            own.append(places.argsort()[batch])
            seen.append(
                observe(
                    module=module, model=model, domain=data.domain, sent=sent, reply=reply.update,
                    batch=data.batch(batch), recipe=Recipe(), defense=f"dp:sigma={sigma}", built_defense=defense,
                    threat=threat_model("D"), candidates=candidates,
                )
            )  # fmt: skip
        found = attack(seen, seeds=[derive(draw, "attack", i) for i in range(len(seen))])
        scores = torch.stack([one.scores for one in found if one.scores is not None])
        shares += picks(scores, size).gather(1, torch.stack(own)).sum(dim=1).tolist()
    tensors = sum(1 for _ in module.parameters())
    spent = Ledger()
    spent.add(release_of(defense, examples=size, tensors=tensors).sigma, 1.0, 1)
    most = ceiling(spent, candidates=len(data), private=size)
    share, (low, high) = sum(shares) / (len(shares) * size), interval(shares, size)
    return {
        "data": data.name, "model": model, "batch_size": size, "sigma": sigma, "examples": len(shares) * size,
        "updates": len(shares), "recognised": share, "low": low, "high": high, "ceiling": most.recognised,
        "chance": size / len(data), "reached": share / most.recognised, "below": low <= most.recognised,
    }  # fmt: skip


def page(rows: Sequence[dict[str, float | str | int]]) -> str:
    lines = [
        f"| {one['data']} | `{one['model']}` | {one['batch_size']} | {one['sigma']:g} | {one['examples']} "
        f"| {one['recognised']:.1%} | {one['low']:.1%} to {one['high']:.1%} | {one['ceiling']:.1%} "
        f"| {one['reached']:.0%} | {one['chance']:.0%} |"
        for one in rows
    ]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10, help="of noise and model, with 100 examples each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    rows, started = [], time.perf_counter()
    for name, model, size in SETTINGS:
        data = load(name)
        for sigma in SIGMAS:
            rows.append(row(data, model, size, sigma, options.draws))
            print(json.dumps(rows[-1]), f"{time.perf_counter() - started:.0f} s", flush=True)
    options.out.write_text("".join(json.dumps(one) + "\n" for one in rows))
    if options.page is not None:
        options.page.write_text(page(rows))


if __name__ == "__main__":
    main()
