"""What `veil` on public features costs: accuracy at several promises, settings chosen without the test set.

`search` leaves a fifth of the training images out, and chooses features, rounds, bound and step on them. It writes the
clients' sum in one product, for many settings at once: that is what equal shares add up to. `train` reads what was
chosen, trains as `gradveil train` does, client by client, and asks the test set once for each seed.

    python scripts/veil_frontier.py search --device cuda --store /dev/shm --out settings.jsonl
    python scripts/veil_frontier.py train --store /dev/shm --settings settings.jsonl --out veil.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil import models
from gradveil.core.registry import join_spec, split_spec
from gradveil.core.seeding import generator
from gradveil.data import ImageSet
from gradveil.defenses import Veil
from gradveil.federated import Federation, Training
from gradveil.federated.run import data_of
from gradveil.models import PublicFeatures, encoded
from gradveil.models.features import Backbones

HELD_OUT = 5
MOMENTUM = 0.9
AT_ONCE = 250
BOUNDS, STEPS = (0.05, 0.1, 0.2, 0.4), (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
PROMISES: tuple[dict[str, float], ...] = ({}, {"ceiling": 0.1}, {"ceiling": 0.034}, {"ceiling": 0.1, "cohort": 100})
"""No defense; 10% and 3.4% of a line-up of 100, in each client's own reply; 10% in the sum of all."""

Row = dict[str, Any]
Examples = tuple[Tensor, Tensor]
"""Features [n, d] and labels [n]."""


@dataclass(frozen=True)
class Setting:
    """How a head is trained. Without a promise there is neither bound nor noise."""

    promise: dict[str, float]
    rounds: int
    bound: float
    lr: float

    @property
    def defense(self) -> Veil | None:
        return Veil(rounds=self.rounds, bound=self.bound, **self.promise) if self.promise else None  # type: ignore[arg-type]


def accuracies(train: Examples, test: Examples, settings: list[Setting], classes: int, noise: float, *,
               bias: bool) -> list[float]:  # fmt: skip
    """Of the mean of the later half of the heads that rounds of FedSGD on equal shares give, one for each setting.

    All have as many rounds. ``noise`` is what clients together add, in units of what one of them adds.
    """
    (seen, labels), rounds = train, settings[0].rounds
    inputs = F.pad(seen, (0, 1), value=1.0) if bias else seen
    device, count = inputs.device, len(settings)
    targets, rng = F.one_hot(labels, classes).to(inputs)[:, None], torch.Generator(device).manual_seed(0)
    lengths = inputs.norm(dim=1)[:, None]
    defenses = [setting.defense for setting in settings]
    bounds = torch.tensor([setting.bound if setting.promise else math.inf for setting in settings], device=device)
    steps = torch.tensor([setting.lr for setting in settings], device=device)[:, None]
    sigmas = torch.tensor(
        [0.0 if veil is None else veil.sigma * veil.bound * noise for veil in defenses], device=device
    )
    head, velocity, mean = (torch.zeros(inputs.shape[1], count, classes, device=device) for _ in range(3))
    for number in range(rounds):
        errors = (inputs @ head.flatten(1)).view(-1, count, classes).softmax(dim=2) - targets
        kept = (bounds / (errors.norm(dim=2) * lengths)).clamp(max=1)
        total = (inputs.T @ (errors * kept[:, :, None]).flatten(1)).view_as(head)
        drawn = torch.randn(len(head), 1, classes, generator=rng, device=device)
        velocity = MOMENTUM * velocity + (total + sigmas[:, None] * drawn) / len(inputs)
        head = head - steps * velocity
        if number >= rounds // 2:
            mean += head / (rounds - rounds // 2)
    inputs = F.pad(test[0], (0, 1), value=1.0) if bias else test[0]
    scores = (inputs @ mean.flatten(1)).view(-1, count, classes)
    right: list[float] = (scores.argmax(dim=2) == test[1][:, None]).double().mean(dim=0).tolist()
    return right


IN_MEMORY: dict[Path, tuple[Tensor, Tensor]] = {}


@torch.no_grad()
def seen_by(backbone: str, data: ImageSet, options: argparse.Namespace, label: str) -> tuple[Tensor, Tensor]:
    """What networks see of pictures, [n, D], and of their mirror images; kept in a file of the store."""
    path = options.store / f"{label}-{backbone}.pt"
    if path in IN_MEMORY:
        return IN_MEMORY[path]
    if not path.exists():
        started, network = time.perf_counter(), Backbones((backbone,), data.domain).to(options.device)
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for start in range(0, len(data), AT_ONCE):
            shown = data.batch(range(start, min(start + AT_ONCE, len(data)))).inputs.to(options.device)
            for part, pictures in zip(found, (shown, shown.flip(-1)), strict=True):
                part.append(network(pictures))
        torch.save(tuple(torch.cat(part) for part in found), path)
        print(f"{label} {backbone}: {time.perf_counter() - started:.0f} s", flush=True)
    plain, mirrored = torch.load(path, map_location=options.device, weights_only=True)
    IN_MEMORY[path] = plain, mirrored
    return plain, mirrored


def features_of(model: PublicFeatures, data: ImageSet, options: argparse.Namespace, label: str) -> Tensor:
    """What ``model.encode`` gives for a data set, from what the store has of it."""
    if options.given:
        return encoded(model, data)
    _, given = split_spec(options.model)
    pairs = [seen_by(each, data, options, label) for each in given["backbone"].split("+")]
    parts = [(plain + mirrored) / 2 if model.backbones.mirror else plain for plain, mirrored in pairs]
    return model.project(torch.cat(parts, dim=1))


def variants(options: argparse.Namespace) -> Iterator[str]:
    """Models to choose from: all combinations of two options, and for the others one at a time; or those given."""
    if options.given:
        yield from options.given
        return
    usual = {"backbone": options.backbone, "pca": max(options.pca) // 2, "whiten": 0.5, "mirror": not options.letters,
             "bias": False}  # fmt: skip
    changes: list[dict[str, Any]] = [{"pca": pca, "whiten": w} for pca in options.pca for w in options.whiten]
    changes += [{"mirror": options.letters}, {"bias": True}]
    changes += [{"backbone": each} for each in options.backbone.split("+") if "+" in options.backbone]
    for change in changes:
        yield join_spec("features", usual | change)


def search(options: argparse.Namespace) -> None:
    train, test = data_of(Training(data=options.data))
    classes, device = train.domain.classes, options.device
    order = torch.randperm(len(train), generator=generator(0, "held out")).to(device)
    count = len(order) // HELD_OUT
    places, labels = (order[count:], order[:count]), train.labels.to(device)
    noise = math.sqrt(options.clients) * (1 - 1 / HELD_OUT)  # as much beside what is left as there will be beside all

    def best(spec: str, promises: tuple[dict[str, float], ...], rounds: int) -> dict[int, tuple[float, Setting]]:
        """By the place of a promise the accuracy on what was left out, and the setting that reaches it."""
        options.model = spec
        model = models.build(spec, train.domain, seed=0).to(device)
        assert isinstance(model, PublicFeatures)
        seen = features_of(model, train, options, options.data)
        own, out = ((seen[part], labels[part]) for part in places)
        settings = [
            Setting(each if "cohort" not in each else each | {"cohort": options.clients}, rounds, bound, lr)
            for each in promises for bound in (BOUNDS if each else (1.0,)) for lr in STEPS
        ]  # fmt: skip
        found: dict[int, tuple[float, Setting]] = {}
        with_bias = model.head.bias is not None
        for one, setting in zip(accuracies(own, out, settings, classes, noise, bias=with_bias), settings, strict=True):
            place = next(i for i, each in enumerate(promises) if each.keys() == setting.promise.keys()
                         and each.get("ceiling") == setting.promise.get("ceiling"))  # fmt: skip
            if one > found.get(place, (0.0,))[0]:
                found[place] = one, setting
        return found

    def keep(spec: str) -> None:
        """Write the features of all images to the store, for ``train``; those of the test set are not looked at."""
        options.model = spec
        model = models.build(spec, train.domain, seed=0).to(device)
        assert isinstance(model, PublicFeatures)
        pairs = (train, options.data), (test, f"{options.data}-test")
        parts = [features_of(model, data, options, label).cpu() for data, label in pairs]
        torch.save((spec, *parts), options.store / f"chosen-{options.data}.pt")

    def note(row: Row) -> None:
        print(json.dumps(row), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    totals = {}
    for spec in variants(options):
        found = best(spec, PROMISES[1:], 80 if max(options.rounds) >= 80 else max(options.rounds))
        totals[spec] = sum(one for one, _ in found.values())
        note({"model": spec, "held_out": [round(found[i][0], 4) for i in sorted(found)]})
    spec = max(totals, key=lambda each: totals[each])
    keep(spec)
    each_rounds = [best(spec, PROMISES, rounds) for rounds in options.rounds]
    for place, promise in enumerate(PROMISES):
        for found in each_rounds:
            one, setting = found[place]
            note({"model": spec, **promise, "rounds": setting.rounds, "bound": setting.bound, "lr": setting.lr,
                  "held_out": round(one, 4)})  # fmt: skip
        one, setting = max((found[place] for found in each_rounds), key=lambda pair: pair[0])
        note({"chosen": place, "data": options.data, "model": spec, "promise": setting.promise,
              "held_out": round(one, 4), "rounds": setting.rounds, "bound": setting.bound,
              "lr": setting.lr})  # fmt: skip


def train(options: argparse.Namespace) -> None:
    """One row for each promise and seed."""
    rows = [json.loads(line) for line in options.settings.read_text().splitlines()]
    chosen = [row for row in rows if row.get("chosen") in options.places]
    own, test = data_of(Training(data=options.data))
    spec, *parts = torch.load(options.store / f"chosen-{options.data}.pt", weights_only=True)
    assert all(row["model"] == spec for row in chosen)
    for seed, row in itertools.product(options.seeds, chosen):
        rounds = row["rounds"]
        setting = Setting(row["promise"], rounds, row["bound"], row["lr"])
        case = Training(
            data=options.data, model=row["model"], clients=options.clients, rounds=rounds, algorithm="fedsgd",
            batch_size=None, lr=setting.lr, server_momentum=MOMENTUM, average_from=rounds // 2 + 1, train_mode=False,
            seed=seed, device=options.device, partition=options.partition, side_by_side="false",
            defense="none" if setting.defense is None else setting.defense.spec,
        )  # fmt: skip
        federation = Federation(case, own)
        for data, features in zip((federation.train, test), parts, strict=True):
            federation.give_features(data, features.to(options.device))
        started = time.perf_counter()
        for number in range(1, rounds + 1):
            federation.round(number)
        seconds = time.perf_counter() - started
        sizes = sorted(len(share) for share in federation.shares)
        line = {
            "data": options.data, "model": row["model"], "clients": options.clients, "partition": options.partition,
            "smallest": sizes[0], "largest": sizes[-1], "defense": case.defense, "rounds": rounds, "lr": setting.lr,
            "seed": seed, "accuracy": federation.quality(test).accuracy, "seconds": round(seconds, 2),
            "device": options.device, "held_out": row["held_out"],
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("search", "train"))
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--backbone", default="efficientnet-lite0+efficientnet-lite2")
    numbers = lambda text: [int(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--pca", type=numbers, default=[256, 512, 1024])
    parser.add_argument("--whiten", type=lambda text: [float(w) for w in text.split(",")], default=[0.25, 0.5, 0.75])
    parser.add_argument("--letters", action="store_true", help="pictures that mean something else in a mirror")
    parser.add_argument("--given", action="append", help="a model to choose from, in the place of all others")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--rounds", type=numbers, default=[40, 80, 160])
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--places", type=numbers, default=list(range(len(PROMISES))), help="promises to train")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--store", type=Path, required=True, help="folder for what networks see, for later runs")
    parser.add_argument("--settings", type=Path, help="what search wrote, for train")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = options.step == "search"
    (search if options.step == "search" else train)(options)


if __name__ == "__main__":
    main()
