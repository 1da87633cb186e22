"""What `veil` on public features costs: accuracy at several promises, settings chosen without the test set.

A tenth of the training images is left out to choose rounds, bound and step. The test set is asked once for each seed.
The search writes the clients' sum in one product, which is what equal shares add up to. The last trainings are those of
`gradveil train`, client by client.

    python scripts/veil_frontier.py --device cuda --out docs/results/veil.jsonl
    python scripts/veil_frontier.py --data cifar10-samples --clients 4 --seeds 1 --rounds 4,8 --out /tmp/rows.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil import models
from gradveil.core.seeding import generator
from gradveil.data import ImageSet
from gradveil.defenses import Veil
from gradveil.federated import Federation, Training
from gradveil.federated.run import data_of
from gradveil.models import PublicFeatures, encoded

HELD_OUT = 10
MOMENTUM = 0.9
BOUNDS, STEPS = (0.05, 0.1, 0.2, 0.4), (5.0, 15.0, 50.0, 150.0)
PROMISES: tuple[dict[str, float], ...] = ({}, {"ceiling": 0.1}, {"ceiling": 0.034}, {"ceiling": 0.1, "cohort": 100})
"""No defense; 10% and 3.4% of a line-up of 100, in each client's own reply; 10% in the sum of all."""

Examples = tuple[Tensor, Tensor]
"""Features [n, d] and labels [n]."""
Setting = tuple[int, float, float]
"""Rounds, bound and step."""


def trained(examples: Examples, classes: int, clients: int, veil: Veil | None, rounds: int, bound: float, lr: float,
            seed: int) -> Tensor:  # fmt: skip
    """[d + 1, classes]: the mean of the later half of the heads that rounds of FedSGD on equal shares give."""
    seen, labels = examples
    inputs = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
    targets, rng = F.one_hot(labels, classes).to(inputs), torch.Generator(inputs.device).manual_seed(seed)
    head, velocity, mean = (torch.zeros(inputs.shape[1], classes, device=inputs.device) for _ in range(3))
    for number in range(rounds):
        errors = (inputs @ head).softmax(dim=1) - targets
        total = torch.zeros_like(head)
        if veil is None:
            total = inputs.T @ errors
        else:
            lengths = errors.norm(dim=1) * inputs.norm(dim=1)
            total = inputs.T @ (errors * (bound / lengths).clamp(max=1)[:, None])
            noise = torch.randn(head.shape, generator=rng, device=head.device)
            total = total + veil.sigma * bound * math.sqrt(clients) * noise
        velocity = MOMENTUM * velocity + total / len(inputs)
        head = head - lr * velocity
        if number >= rounds // 2:
            mean = mean + head / (rounds - rounds // 2)
    return mean


def accuracy(head: Tensor, examples: Examples) -> float:
    seen, labels = examples
    return float(((seen @ head[:-1] + head[-1]).argmax(dim=1) == labels).double().mean())


def chosen(
    whole: Examples, classes: int, promise: dict[str, float], options: argparse.Namespace
) -> tuple[int, float, float]:
    """Rounds, bound and step that do best on the images that were left out."""
    order = torch.randperm(len(whole[1]), generator=generator(0, "held out")).to(whole[1].device)
    count = len(order) // HELD_OUT
    out, own = (tuple(part[places] for part in whole) for places in (order[:count], order[count:]))
    found = []
    bounds = BOUNDS if promise else (1.0,)
    for rounds, bound, lr in itertools.product(options.rounds, bounds, STEPS):
        veil = Veil(rounds=rounds, bound=bound, **promise) if promise else None  # type: ignore[arg-type]
        head = trained(own, classes, options.clients, veil, rounds, bound, lr, 0)  # type: ignore[arg-type]
        found.append((accuracy(head, out), (rounds, bound, lr)))  # type: ignore[arg-type]
    return max(found)[1]


def federated(train: ImageSet, test: ImageSet, spec: str, setting: Setting, promise: dict[str, float],
              seed: int, options: argparse.Namespace) -> tuple[float, float]:  # fmt: skip
    """Accuracy of a training as `gradveil train` runs it, client by client, and the seconds of its rounds."""
    rounds, bound, lr = setting
    defense = Veil(rounds=rounds, bound=bound, **promise) if promise else None  # type: ignore[arg-type]
    case = Training(
        data=options.data, model=spec, clients=options.clients, rounds=rounds, algorithm="fedsgd", batch_size=None,
        lr=lr, server_momentum=MOMENTUM, average_from=rounds // 2 + 1, train_mode=False, seed=seed,
        device=options.device, partition=options.partition, defense="none" if defense is None else defense.spec,
    )  # fmt: skip
    federation = Federation(case, train, defense=defense)
    for data in (federation.train, test):  # features come first: they are computed once and kept
        federation.quality(data)
    started = time.perf_counter()
    for number in range(1, rounds + 1):
        federation.round(number)
    return federation.quality(test).accuracy, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--backbone", default="efficientnet-lite0+efficientnet-lite2")
    parser.add_argument("--pca", type=int, default=512)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--rounds", type=lambda text: [int(each) for each in text.split(",")], default=[40, 80, 160])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    spec = f"features:backbone={options.backbone},pca={options.pca}"
    train, test = data_of(Training(data=options.data))
    started = time.perf_counter()
    model = models.build(spec, train.domain, seed=0).to(options.device)
    assert isinstance(model, PublicFeatures)
    whole: Examples = encoded(model, train), train.labels.to(options.device)
    print(f"features of {len(train)} images: {time.perf_counter() - started:.0f} s", flush=True)
    for each in PROMISES:
        promise = {**each, "cohort": options.clients} if "cohort" in each else dict(each)
        setting = chosen(whole, train.domain.classes, promise, options)
        reached = [
            federated(train, test, spec, setting, promise, seed, options) for seed in range(1, options.seeds + 1)
        ]
        line = {
            "model": spec, "data": train.name, "clients": options.clients, "partition": options.partition,
            **promise, "rounds": setting[0], "bound": setting[1], "lr": setting[2],
            "accuracy": [one for one, _ in reached], "seconds": [round(seconds, 1) for _, seconds in reached],
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
