"""Reconstruction quality of the passive attacks on a GPU; one JSON object a line. See docs/performance.md."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from gradveil import models
from gradveil.attacks import ATTACKS, Budget
from gradveil.client import SimulatedClient
from gradveil.core.seeding import derive
from gradveil.core.streams import Stream
from gradveil.core.trees import moved
from gradveil.core.types import Batch, Recipe
from gradveil.data import ImageSet, MemoryImages, load
from gradveil.metrics import psnr
from gradveil.threat import observe, threat_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ten_images(path: str | None) -> ImageSet:
    """Every 1000th test image of CIFAR-10, from the data set or from an npz of them (x uint8 [10, 32, 32, 3], y)."""
    if path is None:
        return load("cifar10:split=test").subset(range(0, 10_000, 1000))
    with np.load(path) as file:
        images, labels = torch.from_numpy(file["x"]).permute(0, 3, 1, 2), torch.from_numpy(file["y"]).long()
    like = load("cifar10-samples")
    return MemoryImages(
        name="cifar10", images=images, labels=labels, class_names=like.class_names, mean=like.mean, std=like.std
    )


def measure(data: ImageSet, count: int, model: str, attack: str, recipe: Recipe) -> dict[str, object]:
    module = models.build(model, data.domain, seed=0).to(DEVICE)
    client = SimulatedClient(module, recipe=recipe)
    sent, batch = moved(client.model.params, DEVICE), data.batch(range(count))
    seen = []
    for i in range(count):
        one = Batch(batch.inputs[i : i + 1], batch.labels[i : i + 1]).to(DEVICE)
        seen.append(
            observe(
                module=module, model=model, domain=data.domain, sent=sent, batch=one, recipe=recipe, defense="none",
                reply=client.reply(sent, one, Stream.seeded(0, i)).update, threat=threat_model("C"),
            )
        )  # fmt: skip
    started = time.perf_counter()
    found = ATTACKS.build(attack, Budget(4, 2400))(seen, seeds=[derive(0, "attack", i) for i in range(count)])
    seconds = time.perf_counter() - started
    quality = psnr(torch.cat([one.inputs for one in found]), batch.inputs)
    right = sum(int(one.labels == batch.labels[i]) for i, one in enumerate(found))
    steps = sum(one.problem_steps for one in found)
    return {
        "model": model, "train_mode": recipe.train_mode, "attack": attack, "images": count,
        "psnr_mean": round(float(quality.mean()), 2), "psnr_min": round(float(quality.min()), 2),
        "psnr_max": round(float(quality.max()), 2), "above_25": round(float((quality > 25).float().mean()), 3),
        "above_30": round(float((quality > 30).float().mean()), 3), "labels_right": right / count,
        "objective": float(np.mean([one.objective for one in found])), "seconds": round(seconds, 1),
        "problem_steps_per_s": round(steps / seconds), "strategy": found[0].strategy,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", help="npz with the ten images, where CIFAR-10 cannot be fetched")
    parser.add_argument("--lenet", nargs="*", default=["ig", "dlg"])
    parser.add_argument("--resnet", nargs="*", default=["ig:iterations=2400,restarts=4"])
    parser.add_argument("--train-mode", action="store_true", help="measure IG with train-mode batch norm too")
    arguments = parser.parse_args()
    samples = load("cifar10-samples")
    for attack in arguments.lenet:
        print(json.dumps(measure(samples, 64, "lenet:init=wide", attack, Recipe())), flush=True)
    ten = ten_images(arguments.images) if arguments.resnet else samples
    for attack in arguments.resnet:
        print(json.dumps(measure(ten, 10, "resnet18", attack, Recipe())), flush=True)
        if arguments.train_mode:
            print(json.dumps(measure(ten, 10, "resnet18", attack, Recipe(train_mode=True))), flush=True)


if __name__ == "__main__":
    main()
