"""What `veil` costs a network that starts from nothing: whole, and in public subspaces of a few hundred numbers.

Rounds, bound and step are chosen on training images: 10,000 to train on, 2,000 to look at, and noise in proportion, so
that it weighs as much as it will beside all. Then all clients train as in `gradveil train`, and the test set is asked.

    python scripts/veil_any.py --device cuda --model resnet8:init=he --out rows.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from gradveil import models
from gradveil.client import cross_entropy
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import added_at_once, map_each
from gradveil.core.types import Params
from gradveil.data import ImageSet
from gradveil.defenses import Step, Veil
from gradveil.defenses.clip import clipped_mean
from gradveil.federated import Federation, Training
from gradveil.federated.rounds import evaluate
from gradveil.federated.run import data_of
from gradveil.models import Functional

MOMENTUM = 0.9
AT_ONCE = 500


ENDS = [math.inf]


def in_time() -> None:
    """End between two rounds once the time is over: who is killed at work on a GPU may take others down."""
    if time.perf_counter() > ENDS[0]:
        raise SystemExit("no time is left")


def trained(
    spec: str, train: ImageSet, out: ImageSet, veil: Veil, lr: float, noise: float, seed: int, device: str
) -> tuple[float, float]:
    """The accuracy of the last model, and of the mean of the later half, after all rounds of FedSGD in one sum."""
    model = Functional(models.build(spec, train.domain, seed=seed).to(device))
    params, velocity, mean = model.params, map_each(torch.zeros_like, model.params), Params()
    rng, half = Stream.seeded(seed, "veil any"), veil.rounds // 2
    for number in range(1, veil.rounds + 1):
        in_time()
        total = map_each(torch.zeros_like, params)
        for start in range(0, len(train), AT_ONCE):
            batch = train.batch(range(start, min(start + AT_ONCE, len(train)))).to(device)
            step = Step(model=model, loss=cross_entropy, params=params, frozen=model.frozen, batch=batch, number=1,
                        lr=lr, rng=rng)  # fmt: skip
            total = added_at_once(total, clipped_mean(step, veil.bound), float(len(batch)))
        drawn = map_each(lambda tensor: torch.randn_like(tensor) * veil.sigma * veil.bound * noise, total)
        change = map_each(lambda g, n: (g + n) / len(train), total, drawn)
        velocity = added_at_once(change, velocity, MOMENTUM)
        params = added_at_once(params, velocity, -lr)
        if number > half:
            mean = added_at_once(mean, params, 1 / (veil.rounds - half)) if mean else map_each(
                lambda tensor: tensor / (veil.rounds - half), params)  # fmt: skip
    return evaluate(model, params, out).accuracy, evaluate(model, mean, out).accuracy


def chosen(spec: str, train: ImageSet, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds, step, and whether models are averaged: what does best on training images that were left out."""
    order = torch.randperm(len(train), generator=generator(0, "held out"))[: options.few * 6 // 5]
    own, out = train.subset(order[: options.few].sort().values), train.subset(order[options.few :].sort().values)
    noise = math.sqrt(options.clients) * len(own) / len(train)
    best: dict[str, Any] = {"held_out": -1.0}
    for rounds, lr in itertools.product(options.rounds, options.lr):
        torch.manual_seed(0)
        veil = Veil(rounds=rounds, bound=options.bound, ceiling=options.ceiling)
        started = time.perf_counter()
        try:
            last, mean = trained(spec, own, out, veil, lr, noise, 0, options.device)
        except RuntimeError as error:
            print(spec, rounds, lr, str(error)[:100], flush=True)
            continue
        row = {"rounds": rounds, "lr": lr, "averaged": mean > last, "held_out": max(last, mean)}
        print(json.dumps({"model": spec, **row, "seconds": time.perf_counter() - started}), flush=True)
        best = max(best, row, key=lambda each: each["held_out"])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="resnet8:init=he")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--ceiling", type=float, default=0.1)
    parser.add_argument("--bound", type=float, default=1.0)
    parser.add_argument("--rounds", type=lambda text: [int(each) for each in text.split(",")], default=[15, 40])
    parser.add_argument("--lr", type=lambda text: [float(each) for each in text.split(",")], default=[0.1, 0.3, 1.0])
    parser.add_argument("--few", type=int, default=10_000)
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    options = parser.parse_args()
    ENDS[0] = time.perf_counter() + options.seconds
    train, test = data_of(Training(data=options.data))
    train = train.to(options.device)
    found = chosen(options.model, train, options)
    for seed in options.seeds:
        rounds, veil = found["rounds"], Veil(rounds=found["rounds"], bound=options.bound, ceiling=options.ceiling)
        case = Training(
            data=options.data, model=options.model, clients=options.clients, rounds=rounds, algorithm="fedsgd",
            batch_size=None, lr=found["lr"], server_momentum=MOMENTUM, train_mode=False, seed=seed,
            average_from=rounds // 2 + 1 if found["averaged"] else None, device=options.device, side_by_side="false",
            defense=veil.spec,
        )  # fmt: skip
        federation, started = Federation(case, train), time.perf_counter()
        for number in range(1, rounds + 1):
            in_time()
            federation.round(number)
        row = {
            "data": options.data, "model": options.model, "clients": options.clients, "partition": "iid",
            "defense": veil.spec, "numbers": sum(p.numel() for p in federation.state.params.values()), "seed": seed,
            "accuracy": federation.quality(test).accuracy, "seconds": round(time.perf_counter() - started, 1), **found,
            "device": options.device,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
