"""Attacks on ten CIFAR-10 test images behind an untrained ResNet-18, under several defenses at once, on a GPU.

One JSON object a line; the reconstructions go into one npz per attack, to be scored where the weights of LPIPS are.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from quality_gpu import DEVICE, ten_images

from gradveil import models
from gradveil.attacks import ATTACKS, Budget
from gradveil.client import SimulatedClient
from gradveil.core.seeding import derive
from gradveil.core.streams import Stream
from gradveil.core.trees import moved
from gradveil.core.types import Recipe
from gradveil.defenses import DEFENSES
from gradveil.metrics import psnr
from gradveil.threat import Observation, observe, threat_model

TABLE_I = ("none", "noise:sigma=0.1", "clip:bound=4", "sparsify:rate=0.9", "soteria:rate=0.8", "censor")
"""The defenses of CENSOR's Table I."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", help="npz with the ten images, where CIFAR-10 cannot be fetched")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--attacks", nargs="+", default=["ig", "ggl:optimizer=adam", "gias", "gifd"])
    parser.add_argument("--defenses", nargs="+", default=list(TABLE_I))
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=2400)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    arguments = parser.parse_args()
    data = ten_images(arguments.images)
    batch, recipe = data.batch(range(10)), Recipe()
    module = models.build(arguments.model, data.domain, seed=0).to(DEVICE)
    sent = moved(dict(module.named_parameters()), DEVICE)
    sent = {name: tensor.detach().clone() for name, tensor in sent.items()}
    seen: list[Observation] = []
    for defense in arguments.defenses:
        client = SimulatedClient(module, recipe=recipe, defense=DEFENSES.build(defense))
        for i in range(10):
            one = batch.take(slice(i, i + 1)).to(DEVICE)
            reply = client.reply(sent, one, Stream.seeded(0, "defense", defense, i)).update
            seen.append(
                observe(
                    module=module, model=arguments.model, domain=data.domain, sent=sent, reply=reply, batch=one,
                    recipe=recipe, defense=defense, threat=threat_model("C"),
                )
            )  # fmt: skip
    seeds = [derive(0, "attack", i) for i in range(10)] * len(arguments.defenses)
    for spec in arguments.attacks:
        started = time.perf_counter()
        found = ATTACKS.build(spec, Budget(arguments.restarts, arguments.iterations))(seen, seeds=seeds)
        seconds = time.perf_counter() - started
        pictures = torch.stack([one.inputs[0] for one in found]).view(-1, 10, *data.domain.shape)
        for i, defense in enumerate(arguments.defenses):
            quality, mine = psnr(pictures[i], batch.inputs), found[10 * i : 10 * i + 10]
            right = sum(int(one.labels == batch.labels[k]) for k, one in enumerate(mine))
            row = {
                "attack": spec, "defense": defense, "psnr": round(float(quality.mean()), 2),
                "psnr_min": round(float(quality.min()), 2), "psnr_max": round(float(quality.max()), 2),
                "labels": right / 10, "objective": float(np.mean([one.objective for one in mine])),
                "seconds_all_defenses": round(seconds, 1), "strategy": found[0].strategy,
            }  # fmt: skip
            print(json.dumps(row), flush=True)
        name = spec.replace(":", "-").replace("=", "_").replace(",", "-")
        arguments.out.mkdir(parents=True, exist_ok=True)
        half = pictures.mul(65535).round().to(torch.int32).numpy().astype(np.uint16)
        np.savez_compressed(arguments.out / f"{name}.npz", pictures=half, defenses=np.array(arguments.defenses))


if __name__ == "__main__":
    main()
