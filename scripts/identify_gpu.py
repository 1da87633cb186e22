"""How often the private image is ranked first among candidates; one JSON object a line. See docs/attacks/identify.md.

    python scripts/identify_gpu.py --model resnet18 --images 200 --defense censor --defense censor:norms=public \
        --attack fingerprint --attack fingerprint:by=orthogonality

Private images are spread evenly over the CIFAR-10 test images, or over those of an npz (x uint8 [n, 32, 32, 3], y [n]).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import numpy as np
import torch

from gradveil import models
from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.client import SimulatedClient
from gradveil.core.seeding import derive
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.data import ImageSet, MemoryImages, load
from gradveil.defenses import DEFENSES, PublicData
from gradveil.engine import without_tf32
from gradveil.metrics import ranks
from gradveil.threat import Observation, observe, threat_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = Recipe(lr=0.1)


def candidates(path: str | None, count: int) -> ImageSet:
    if path is None:
        return load("cifar10:split=test").subset(range(count))
    with np.load(path) as file:
        images, labels = torch.from_numpy(file["x"]).permute(0, 3, 1, 2), torch.from_numpy(file["y"]).long()
    like = load("cifar10-samples")
    return MemoryImages(
        name="cifar10 test", images=images[:count].contiguous(), labels=labels[:count], class_names=like.class_names,
        mean=like.mean, std=like.std,
    )  # fmt: skip


def replies(data: ImageSet, private: torch.Tensor, model: str, defense: str, threat: str) -> Iterator[Observation]:
    """What is seen of a client with this defense, for each private image."""
    built, guard = models.build(model, data.domain, seed=0), DEFENSES.build(defense)
    module = guard.on_model(built).to(DEVICE)
    sent = {name: p.detach().clone() for name, p in module.named_parameters()}
    client = SimulatedClient(module, recipe=RECIPE, defense=guard, public=PublicData(data.batch(private).inputs))
    for i in private.tolist():
        batch = data.batch([i]).to(DEVICE)
        yield observe(
            module=module, model=model, domain=data.domain, sent=sent, batch=batch, recipe=RECIPE, defense=defense,
            reply=client.reply(sent, batch, Stream.seeded(0, "defense", i)).update,
            threat=threat_model(threat), candidates=data,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--defense", action="append", default=None)
    parser.add_argument("--attack", action="append", default=None)
    parser.add_argument("--threat", default="D")
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--candidates", type=int, default=10_000)
    parser.add_argument("--npz", default=None)
    options = parser.parse_args()
    data = candidates(options.npz, options.candidates)
    private = torch.arange(options.images) * (len(data) // options.images)
    for defense in options.defense or ["censor"]:
        with without_tf32():
            seen = list(replies(data, private, options.model, defense, options.threat))
        for attack in options.attack or ["fingerprint"]:
            started = time.perf_counter()
            seeds = [derive(0, "attack", i) for i in range(len(seen))]
            found = ATTACKS.build(attack, BUDGETS["quick"])(seen, seeds=seeds)
            seconds = time.perf_counter() - started
            places = ranks(torch.stack([one.scores for one in found if one.scores is not None]), private)
            right = [bool(one.labels[0] == data.labels[i]) for one, i in zip(found, private.tolist(), strict=True)]
            print(json.dumps({
                "model": options.model, "defense": defense, "attack": attack, "images": len(seen),
                "candidates": len(data), "first": int((places == 1).sum()), "median_rank": int(places.median()),
                "labels_right": sum(right), "ranks": places.tolist(), "seconds": round(seconds, 1), "device": DEVICE,
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
