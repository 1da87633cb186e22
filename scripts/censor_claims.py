"""Small studies of what CENSOR's paper says where no table of it does: one JSON object a line for each point.

    PYTHONPATH=src python scripts/censor_claims.py --list
    PYTHONPATH=src python scripts/censor_claims.py named crafted --out docs/results/censor-claims.jsonl

A row has the study, the claims it is about (docs/results/claims/censor.yaml), the settings of the point and what was
measured. Points that the file holds already are not run again, and none is begun after ``--limit`` seconds.
``recognised`` is the share of private images that are nearest, pixel by pixel, to what was rebuilt, among all 100.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gradveil import models
from gradveil.attacks import ATTACKS, BUDGETS, Learned, Reconstruction
from gradveil.attacks.parts.labels import infer_labels
from gradveil.auditing import make_case, run_case
from gradveil.client import SimulatedClient
from gradveil.core.environment import environment
from gradveil.core.seeding import derive, generator
from gradveil.core.streams import Stream
from gradveil.core.trees import map_each, norm
from gradveil.core.types import Batch, Json, Params, Recipe
from gradveil.data import load
from gradveil.data.public import PublicImages
from gradveil.defenses import DEFENSES, Log, PublicData
from gradveil.federated import make_training, run_training
from gradveil.generators import build as build_generator
from gradveil.lab.bench import overhead
from gradveil.metrics import psnr, ssim
from gradveil.metrics.perceptual import LPIPS
from gradveil.models import logits_of
from gradveil.threat import Observation, observe, threat_model

RELEASED = "censor:projection=released,lr=1e-4,fallback=original"
"""What the authors' code does, in the rounds in which it is active."""
STRIDE = 13
"""Steps through the 100 samples: all classes come up, and no image twice."""
STUDIES: dict[str, tuple[tuple[str, ...], Sequence[Json], Callable[..., Json]]] = {}


def study(*claims: str, points: Sequence[Json]) -> Callable[[Callable[..., Json]], Callable[..., Json]]:
    """Registers what measures a point: its settings are arguments, what it returns goes into the row."""

    def register(measure: Callable[..., Json]) -> Callable[..., Json]:
        STUDIES[measure.__name__] = claims, points, measure
        return measure

    return register


def seen(
    defense: str, *, model: str, images: int, device: str, threat: str = "C", places: Sequence[int] = (),
    data: str = "cifar10-samples", scale: float = 1.0,
) -> tuple[list[Observation], Log, Batch]:  # fmt: skip
    """What is seen of clients with one image each, what their defense logged, and the truth.

    The broadcast is the model's own parameters times ``scale``, of which clients are not told.
    """
    known, own, recipe = load(data), DEFENSES.build(defense), Recipe()
    places = list(places) or [STRIDE * number % len(known) for number in range(images)]
    module = models.build(model, known.domain, seed=0).to(device)
    private = PublicData(known.batch(places).inputs.to(device))
    client = SimulatedClient(module, recipe=recipe, defense=own, public=private)
    sent = {name: scale * tensor for name, tensor in client.model.params.items()}
    found, log = [], Log()
    for number, place in enumerate(places):
        batch = known.batch([place]).to(device)
        reply = client.reply(sent, batch, Stream.seeded(0, "client", number))
        log.merge(reply.log)
        found.append(
            observe(
                module=module, model=model, domain=known.domain, sent=sent, reply=reply.update, batch=batch,
                recipe=recipe, defense=defense, built_defense=own, threat=threat_model(threat), candidates=known,
                public=PublicImages.apart_from(known),
            )
        )  # fmt: skip
    return found, log, known.batch(places)


def attacked(attack: str, observations: list[Observation], truth: Batch, data: str = "cifar10-samples") -> Json:
    """How near an attack comes."""
    built = ATTACKS.build(attack, BUDGETS["standard"])
    found = built(observations, seeds=[derive(0, "attack", number) for number in range(len(observations))])
    return scored(found, truth, data)


def scored(found: Sequence[Reconstruction], truth: Batch, data: str = "cifar10-samples") -> Json:
    pictures, labels = torch.cat([one.inputs for one in found]).cpu(), torch.cat([one.labels for one in found]).cpu()
    known, quality = load(data), psnr(pictures, truth.inputs)
    gallery = known.batch(range(min(100, len(known)))).inputs.flatten(1)
    nearest = gallery[torch.cdist(pictures.flatten(1), gallery).argmin(dim=1)]
    return {
        "psnr": round(float(quality.mean()), 2), "psnrs": [round(value, 1) for value in quality.tolist()],
        "ssim": round(float(ssim(pictures, truth.inputs).mean()), 3),
        "recognised": round(float((nearest == truth.inputs.flatten(1)).all(dim=1).double().mean()), 3),
        "labels_right": round(float((labels == truth.labels).double().mean()), 3),
    }  # fmt: skip


def audited(device: str, **fields: Any) -> Json:
    """The means of an audit of one attack and one defense."""
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        row = run_case(make_case({"device": device, **fields}), Path(folder) / "audit").as_json()["rows"][0]
    wanted = ("mse", "psnr", "ssim", "lpips", "identified", "label_accuracy", "log")
    return {name: row.get(name) for name in wanted} | {"psnrs": [round(one["psnr"], 1) for one in row["per_image"]]}


def across(**words: Sequence[Any]) -> list[Json]:
    """All combinations."""
    points: list[Json] = [{}]
    for name, values in words.items():
        points = [point | {name: value} for point in points for value in values]
    return points


LENETS = [
    "censor", "censor:projection=none,trials=1", "censor:projection=none", "censor:projection=none,trials=500",
    "censor:projection=none,norms=public",
    "censor:orthogonal=examples", "censor:orthogonal=examples,norms=public", "censor:source=public",
    "censor:source=public,norms=public", "censor:source=public,public_class=2",
    *(f"censor:temperature={value}" for value in ("1e-4", "0.01", "1", "100")),
]  # fmt: skip


@study(
    "C-05", "C-06", "C-44", "C-45", "C-104", "C-126", "C-127",
    points=[
        *across(model=["lenet:init=wide"], defense=LENETS, images=[20]),
        *across(model=["convnet", "vit"], defense=["censor", RELEASED], images=[4]),
    ],
)  # fmt: skip
def named(device: str, *, model: str, defense: str, images: int) -> Json:
    """How many private images an attacker with 100 candidates names who knows the defense, and labels without any."""
    observations, log, truth = seen(defense, model=model, images=images, device=device, threat="D")
    found = ATTACKS.build("identify", BUDGETS["quick"])(observations, seeds=list(range(images)))
    read = infer_labels(observations, 1).flatten().cpu()
    return {"named": scored(found, truth)["recognised"], "log": log.means()} | {
        "labels_right": round(float((read == truth.labels).double().mean()), 3)
    }


WALKS = [
    *(f"temperature={value}" for value in ("0", "0.01", "1", "100")),
    "norms=random", "norms=public", "layerwise=false",
]  # fmt: skip


@study("C-06", "C-39", "C-124", "C-127", points=across(options=WALKS))
def walk(device: str, *, options: str) -> Json:
    """A trained network that takes 30 steps along accepted trials alone: quality before and after, on other images."""
    data, recipe, steps = load("mnist"), Recipe(lr=1.0), 30
    plain = SimulatedClient(models.build("mlp:normalize=true", data.domain, seed=0).to(device), recipe=recipe)
    defense = DEFENSES.build(f"censor:fallback=skip,{options}")
    client = SimulatedClient(plain.model.module, recipe=recipe, defense=defense)
    test = load("mnist:split=test").batch(range(1000)).to(device)
    params = plain.model.params

    def quality() -> Json:
        with torch.no_grad():
            outputs = logits_of(torch.func.functional_call(plain.model.module, params, (test.inputs,)))
        right = (outputs.argmax(dim=1) == test.labels).double().mean()
        return {"loss": round(float(F.cross_entropy(outputs, test.labels)), 3), "accuracy": round(float(right), 3)}

    def step(of: SimulatedClient, number: int, rate: float) -> Log:
        nonlocal params
        batch = data.batch(range(64 * number, 64 * number + 64)).to(device)
        reply = of.reply(params, batch, Stream.seeded(0, "walk", number))
        params = {name: tensor - rate * reply.update[name] for name, tensor in params.items()}
        return reply.log

    for number in range(200):
        step(plain, number, 0.1)
    before, log = quality(), Log()
    for number in range(200, 200 + steps):
        log.merge(step(client, number, recipe.lr))
    return {"before": before, "after": quality(), "accepted": round(1 - log.means()["fallback_rate"], 3)}


@study(
    "C-42",
    points=[
        {"sampler": "metropolis", "trials": 1},
        *across(sampler=["printed", "cold"], trials=[1, 20]),
    ],
)
def posterior(_: str, *, sampler: str, trials: int) -> Json:
    """Ten weights and 20 examples: the walk of accepted updates at M = 1 beside draws from the posterior itself.

    ``metropolis`` proposes steps of a fixed length, ``printed`` and ``cold`` are CENSOR's rules without a projection.
    The prior is N(0, 1), which ``cold`` leaves out.
    """
    rng = generator(0, "posterior")
    inputs = torch.randn((20, 1, 2, 2), generator=rng)
    labels = (inputs.flatten(1).sum(dim=1) + torch.randn(20, generator=rng) > 0).long()
    batch, recipe, steps = Batch(inputs, labels), Recipe(lr=0.5), 4000
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=rng))
    options = f"censor:projection=none,fallback=skip,trials={trials},temperature=1"
    defense = DEFENSES.build(f"{options},acceptance=printed" if sampler == "printed" else options)
    client = SimulatedClient(module, recipe=recipe, defense=defense)
    params, losses, weights, moved = client.model.params, [], [], 0

    def energy(at: Params) -> float:
        outputs = torch.func.functional_call(module, at, (inputs,))
        prior = sum(float(tensor.square().sum()) for tensor in at.values()) / 2
        return 20 * float(F.cross_entropy(outputs, labels)) + prior

    for number in range(steps):
        if sampler == "metropolis":
            tried = map_each(lambda x: x + 0.5 * torch.randn(x.shape, generator=rng), params)
            accepted = math.log(max(float(torch.rand((), generator=rng)), 1e-30)) < energy(params) - energy(tried)
            params = tried if accepted else params
        else:
            reply = client.reply(params, batch, Stream.seeded(0, "posterior", number))
            accepted = reply.log.means()["fallback_rate"] == 0
            params = {name: tensor - recipe.lr * reply.update[name] for name, tensor in params.items()}
        moved += accepted
        if number >= steps // 4:
            outputs = torch.func.functional_call(module, params, (inputs,))
            losses.append(float(F.cross_entropy(outputs, labels)))
            weights.append(torch.cat([tensor.detach().flatten() for tensor in params.values()]))
    spread = torch.stack(weights).std(dim=0)
    return {
        "accepted": round(moved / steps, 3), "loss": round(sum(losses) / len(losses), 4),
        "spread_of_weights": round(float(spread.mean()), 4),
    }  # fmt: skip


@study("C-115", points=across(scale=[1.0, 0.5, 0.2, 0.1, 0.05], images=[8]))
def crafted(device: str, *, scale: float, images: int) -> Json:
    """A server that shrinks the parameters before it broadcasts them: how often Algorithm 1 then sends the gradient."""
    defense = "censor:fallback=original"
    observations, log, truth = seen(defense, model="lenet:init=wide", images=images, device=device, scale=scale)
    return {"log": log.means(), **attacked("ig:iterations=1000,restarts=1", observations, truth)}


@study("C-122", points=across(model=["lenet"], share=[-0.3, -0.03, 0, 0.003, 0.01, 0.03, 0.1, 0.3]))
def labels_left(device: str, *, model: str, share: float) -> Json:
    """Labels read in the usual way where a part of the gradient, with this cosine, is left in what CENSOR sends."""
    plain, _, truth = seen("none", model=model, images=50, device=device)
    censored, _, _ = seen("censor", model=model, images=50, device=device)
    for true, other in zip(plain, censored, strict=True):
        rest = math.sqrt(1 - share**2)
        true.reply.update({name: share * tensor + rest * other.reply[name] for name, tensor in true.reply.items()})
    read = infer_labels(plain, 1).flatten().cpu()
    return {"images": 50, "labels_right": round(float((read == truth.labels).double().mean()), 3)}


@study("C-122", points=across(model=["lenet", "lenet:init=wide", "lenet:init=he"], defense=[RELEASED], images=[50]))
def labels_released(device: str, *, model: str, defense: str, images: int) -> Json:
    """Labels read in the usual way off what the authors' code sends."""
    observations, log, truth = seen(defense, model=model, images=images, device=device)
    read = infer_labels(observations, 1).flatten().cpu()
    return {"log": log.means(), "labels_right": round(float((read == truth.labels).double().mean()), 3)}


@study(
    "C-103",
    points=across(
        model=["lenet", "convnet"],
        defense=["censor", "censor:source=public,public_class=2", "censor:source=public,public_class=7"], images=[20],
    ),
)  # fmt: skip
def public_label(device: str, *, model: str, defense: str, images: int) -> Json:
    """Labels read in the usual way, by who does not know CENSOR, where trials are gradients of one public class."""
    observations, log, truth = seen(defense, model=model, images=images, device=device, threat="B")
    read = infer_labels(observations, 1).flatten().cpu()
    counts = torch.bincount(read, minlength=10).tolist()
    return {"log": log.means(), "read": counts, "labels_right": round(float((read == truth.labels).double().mean()), 3)}


@study("C-31", points=across(defense=["none", "censor"], others=[1024]))
def one_for_many(device: str, *, defense: str, others: int) -> Json:
    """One client with a batch of so many beside as many clients with one image each: what the server gets from both."""
    data = load("mnist")
    module, own = models.build("lenet", data.domain, seed=0).to(device), DEFENSES.build(defense)
    client = SimulatedClient(module, recipe=Recipe(), defense=own)
    sent, batch = client.model.params, data.batch(range(others)).to(device)
    one = client.reply(sent, batch, Stream.seeded(0)).update
    each = [
        client.reply(sent, batch.take(slice(place, place + 1)), Stream.seeded(1, place)).update
        for place in range(others)
    ]
    many = map_each(lambda *tensors: torch.stack(tensors).mean(dim=0), *each)
    away = norm(map_each(torch.sub, one, many)) / norm(one)
    return {"distance": float(away), "norm_of_one": float(norm(one)), "norm_of_many": float(norm(many))}


@study(
    "C-97", "C-129",
    points=[
        {"draws": 0, "averaged": "distances"},
        *across(draws=[1, 16], averaged=["distances", "gradients", "nearest"]),
    ],
)  # fmt: skip
def eot(device: str, *, draws: int, averaged: str) -> Json:
    """IG that averages over CENSOR's draws, by their number and by what is averaged."""
    observations, _, truth = seen("censor", model="lenet:init=wide", images=4, device=device)
    options = f",draws={draws},averaged={averaged}" if draws else ""
    return {"images": 4, **attacked(f"ig:iterations=300,restarts=1{options}", observations, truth)}


GENERATIVE = ("ggl:optimizer=adam,iterations=150", "gias:iterations=64", "gifd:iterations=120")


@study("C-19", points=across(attack=GENERATIVE, data=["mnist:split=test", "fashion-mnist:split=test"]))
def foreign(device: str, *, attack: str, data: str) -> Json:
    """Attacks with a generator of digits on digits, which it knows, and on clothes, which it does not."""
    observations, _, truth = seen("none", model="lenet:init=wide", images=4, device=device, data=data)
    return {"images": 4, **attacked(f"{attack},restarts=1,generator=mnist", observations, truth, data)}


@study(
    "C-34",
    points=across(
        label=[2], attack=["ggl:optimizer=adam,iterations=200,restarts=1", "ig:iterations=400,restarts=1"],
        model=["lenet:init=wide"],
    ),
)  # fmt: skip
def one_class(device: str, *, label: int, attack: str, model: str) -> Json:
    """Six images of one class: how like one another the rebuilt pictures are, beside how like the private images."""
    places = (load("cifar10-samples").labels == label).nonzero().flatten().tolist()[:6]
    observations, _, truth = seen("none", model=model, images=6, device=device, places=places)
    built = ATTACKS.build(attack, BUDGETS["standard"])
    found = built(observations, seeds=list(range(6)))
    pictures = torch.cat([one.inputs for one in found]).cpu()
    one, other = torch.combinations(torch.arange(6)).unbind(dim=1)
    row = scored(found, truth) | {
        "ssim_among_rebuilt": round(float(ssim(pictures[one], pictures[other]).mean()), 3),
        "ssim_among_private": round(float(ssim(truth.inputs[one], truth.inputs[other]).mean()), 3),
    }
    try:
        away = LPIPS().pairwise(pictures, torch.cat([pictures, truth.inputs]))
    except Exception:  # its weights may not be on this machine: the row is then without it
        return row
    return row | {
        "lpips_among_rebuilt": round(float(away[one, other].mean()), 3),
        "lpips_to_private": round(float(away[:, 6:].diagonal().mean()), 3),
    }


@study("C-18", points=across(attack=["ig", "gi", "ggl:optimizer=adam", "gias", "gifd"], images=[4]))
def effort(device: str, *, attack: str, images: int) -> Json:
    """Processor time of 64 steps, and how many numbers are searched for each image."""
    observations, _, truth = seen("none", model="lenet:init=wide", images=images, device=device)
    started = time.process_time()
    attacked(f"{attack}{',' if ':' in attack else ':'}iterations=64,restarts=1", observations, truth)
    took = round(time.process_time() - started, 1)
    generator, pixels = build_generator("cifar10"), truth.inputs[0].numel()
    weights = sum(tensor.numel() for tensor in generator.parameters())
    unknowns = {"ig": pixels, "gi": pixels, "ggl": generator.latent, "gias": weights}
    return {"processor_seconds": took, "unknowns_of_an_image": unknowns.get(attack.partition(":")[0])}


@study(
    "C-29",
    points=[
        {"data": data, "batch_size": size, "threat": threat}
        for data, size, threat in (
            ("cifar10-samples", 1, "C"), ("cifar10-samples", 1, "E"), ("photos-64", 1, "C"), ("photos-64", 1, "E"),
            ("cifar10-samples", 2, "C"), ("cifar10-samples", 2, "C+labels"), ("cifar10-samples", 2, "E+labels"),
        )
    ],
)  # fmt: skip
def statistics(device: str, *, data: str, batch_size: int, threat: str) -> Json:
    """GI with and without batch-norm statistics and labels, at two image sizes."""
    fields: Json = {"defenses": ["none"], "images": 2, "every": 13, "restarts": 1, "attacks": ["gi:iterations=200"]}
    return audited(device, data=data, batch_size=batch_size, threat=threat, model="convnet:width=16", **fields)


@study("C-53", "C-100", "C-101", "C-102", points=across(trials=[1, 5, 20, 50], images=[8]))
def by_trials(device: str, *, trials: int, images: int) -> Json:
    """Algorithm 1 by its number of trials: how often it sends the gradient, and what IG makes of what it sends."""
    defense = f"censor:fallback=original,trials={trials}"
    observations, log, truth = seen(defense, model="lenet:init=wide", images=images, device=device)
    return {"log": log.means(), **attacked("ig:iterations=600,restarts=1", observations, truth)}


@study(
    "C-128",
    points=[
        {"model": "lenet", "batch_size": 64}, {"model": "lenet", "batch_size": 8},
        {"model": "convnet", "batch_size": 8}, {"model": "vit", "batch_size": 8},
        {"model": "resnet18", "batch_size": 8},
    ],
)  # fmt: skip
def cost(device: str, *, model: str, batch_size: int) -> Json:
    """How many times as long a local step takes with 20 trials."""
    row = overhead(model=model, batch_size=batch_size, device=device, defenses=["censor"], repeats=2)["rows"][0]
    size = sum(tensor.numel() for tensor in models.build(model, load("cifar10-samples").domain, seed=0).parameters())
    return {"parameters": size, **row}


@study(
    "C-114",
    points=across(defense=["none", "censor"], pairs=[1000]),
)
def learned(device: str, *, defense: str, pairs: int) -> Json:
    """A decoder trained on what the defense does to public images."""
    observations, _, truth = seen(defense, model="lenet:init=wide", images=50, device=device, threat="D")
    chosen = Learned(rank=True, pairs=pairs, keep=False)(observations)
    rebuilt = Learned(pairs=pairs, keep=False)(observations)
    return {"images": 50, **scored(rebuilt, truth), "named": scored(chosen, truth)["recognised"]}


@study(
    "C-06", "C-54", "C-91", "C-112", "C-113", "C-120",
    points=[
        *across(
            defense=["none", *(f"censor:fallback=original,trials={t}" for t in (1, 5, 20)), "censor:fallback=skip"],
            per_round=[10], rounds=[60],
        ),
        *across(defense=["none", "censor:fallback=original,trials=5"], per_round=[30], rounds=[20]),
        {"defense": f"{RELEASED},rounds=10", "per_round": 10, "rounds": 20},
    ],
)  # fmt: skip
def training(device: str, *, defense: str, per_round: int, rounds: int) -> Json:
    """6,000 digits of 100 clients with unequal shares, as in `gradveil reproduce censor-fig7 --scale small`."""
    fields: Json = {
        "data": "mnist", "model": "mlp:normalize=true", "partition": "dirichlet:alpha=0.5", "clients": 100,
        "per_round": per_round, "algorithm": "fedsgd", "batch_size": 64, "lr": 0.1, "rounds": rounds,
        "evaluate_every": 20, "checkpoint_every": rounds, "examples": 6000, "defense": defense, "device": device,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        rows = run_training(make_training(fields), Path(folder) / "training")["rows"]
    evaluated = {str(row["round"]): round(row["accuracy"], 4) for row in rows if row["accuracy"] is not None}
    fallbacks = [row["log"]["fallback_rate"] for row in rows if "fallback_rate" in row["log"]]
    mean = round(sum(fallbacks) / len(fallbacks), 4) if fallbacks else None
    return {"accuracy": evaluated, "loss": rows[-1]["loss"], "fallback_rate": mean}


def points_of(names: Sequence[str]) -> Iterator[tuple[str, Json]]:
    for name in names:
        for point in STUDIES[name][1]:
            yield name, point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*STUDIES, []])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="append to this file")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no point is begun")
    parser.add_argument("--only", default="", help="points whose settings hold this text")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        for name, (claims, points, measure) in STUDIES.items():
            print(f"{name}: {len(points)} points, {', '.join(claims)}\n    {(measure.__doc__ or '').splitlines()[0]}")
        return
    started, where = time.perf_counter(), environment(options.device)["device"]
    lines = options.out.read_text().splitlines() if options.out is not None and options.out.exists() else []
    done = [json.loads(line) for line in lines]
    for name, point in points_of(options.names or [*STUDIES]):
        if options.only not in json.dumps(point) or time.perf_counter() - started > options.limit:
            continue
        if any(row["study"] == name and row["settings"] == point and row["device"] == where for row in done):
            continue
        claims, _, measure = STUDIES[name]
        begun = time.perf_counter()
        row = {"study": name, "claims": claims, "settings": point, "device": where}
        row |= {"found": measure(options.device, **point), "seconds": round(time.perf_counter() - begun, 1)}
        print(json.dumps(row), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
