"""OUTPOST's equations (5) and (6), its Theorem 1 on a convex problem, and what each of its four options does.

    PYTHONPATH=src python scripts/outpost_theory.py equations bound ablation >> docs/results/outpost-theory.jsonl

Prints one JSON object a line; ``docs/results/outpost-theory.md`` reads them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil import models
from gradveil.client import SimulatedClient, cross_entropy
from gradveil.core.streams import Stream
from gradveil.core.trees import dot, norm, subtract
from gradveil.core.types import Batch, Json, Params, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, Defense, Step
from gradveil.defenses.outpost import layer_risks, layers
from gradveil.models import Functional

SCALE, PHI, RHO = 0.8, 40.0, 80.0
CLIENTS, EACH, BATCH, RIDGE = 4, 25, 5, 0.1
STEPS, MARKS = 4000, (10, 30, 100, 300, 1000, 2000, 4000)


def step_of(module: nn.Module, batch: Batch, seed: int = 0) -> Step:
    model = Functional(module)
    rng = Stream.seeded(seed, "defense")
    return Step(model=model, loss=cross_entropy, params=model.params, batch=batch, number=1, lr=0.1, rng=rng)


def squared(tree: Params) -> float:
    return float(dot(tree, tree))


def equations(draws: int = 20) -> Iterator[Json]:
    """How far a perturbed gradient is from the original, and from that of all local examples, beside the bounds."""
    data = load("cifar10-samples")
    everything = data.batch(range(32))
    for model in ("lenet:init=wide", "lenet", "convnet:width=8"):
        module = models.build(model, data.domain, seed=0)
        mean = step_of(module, everything).gradient()
        found: dict[str, float] = {}
        for i in range(draws):
            step = step_of(module, everything.take(torch.tensor([i])), seed=i)
            gradient = step.gradient()
            for name, spec in (("moved", "outpost"), ("by_pruning", "outpost:scale=0"), ("by_noise", "outpost:rho=0")):
                sent = DEFENSES.build(spec).on_gradient(gradient, replace(step, rng=Stream.seeded(i)))
                found[name] = found.get(name, 0.0) + squared(subtract(sent, gradient)) / draws
                if name == "moved":
                    found["from_mean"] = found.get("from_mean", 0.0) + squared(subtract(sent, mean)) / draws
                if name != "by_pruning":
                    after = "square_after" if name == "moved" else "square_after_noise"
                    found[after] = found.get(after, 0.0) + squared(sent) / draws
            found["square"] = found.get("square", 0.0) + squared(gradient) / draws
            found["largest_square"] = max(found.get("largest_square", 0.0), squared(gradient))
            found["variance"] = found.get("variance", 0.0) + squared(subtract(gradient, mean)) / draws
        groups = layers(mean)
        risk = float(layer_risks(Functional(module).params, groups).max())
        bound = (SCALE * risk) ** 2 * len(groups)
        row = {"kind": "equations", "model": model, "draws": draws, "layers": len(groups), "largest_risk": risk}
        yield row | found | {"bound_5": bound, "bound_6": bound + found["variance"]}


@dataclass
class Softmax:
    """Softmax regression with a ridge: 49 pixels of length 1 to ten classes, one layer without bias, four clients.

    With inputs of length 1 every F_k is (1/2 + ridge)-smooth and ridge-strongly convex, and the gradient of one example
    is at most sqrt(2) long beside that of the ridge.
    """

    clients: list[Batch]

    def value(self, weight: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(batch.inputs @ weight.T, batch.labels) + RIDGE / 2 * weight.square().sum()

    def gradient(self, weight: Tensor, batch: Batch) -> Tensor:
        wrong = torch.softmax(batch.inputs @ weight.T, 1) - F.one_hot(batch.labels, 10)
        return wrong.T @ batch.inputs / len(batch) + RIDGE * weight

    def lowest(self, batch: Batch) -> tuple[float, Tensor]:
        """The minimum by steps of 1 / L, until nothing moves any more."""
        weight = torch.zeros(10, 49, dtype=torch.float64)
        for _ in range(3000):
            weight = weight - self.gradient(weight, batch) / (0.5 + RIDGE)
        return float(self.value(weight, batch)), weight


def digits() -> Softmax:
    """Each client has 25 of the 100 shipped digits: the labels in order, so that clients differ."""
    data = load("mnist-samples")
    order = data.labels.argsort(stable=True).tolist()
    batch = data.batch(order)
    pixels = F.avg_pool2d(batch.inputs.double(), 4).flatten(1)
    whole = Batch(pixels / pixels.norm(dim=1, keepdim=True), batch.labels)
    return Softmax([whole.take(slice(EACH * k, EACH * (k + 1))) for k in range(CLIENTS)])


def bound(epochs: tuple[int, ...] = (1, 5)) -> Iterator[Json]:
    """Theorem 1 beside F(w_t) - F* of FedAvg with all clients, E local steps, and the theorem's learning rate."""
    problem = digits()
    whole = Batch(*(torch.cat(part) for part in zip(*((c.inputs, c.labels) for c in problem.clients), strict=True)))
    lowest, best = problem.lowest(whole)
    apart = lowest - sum(problem.lowest(own)[0] for own in problem.clients) / CLIENTS
    smooth, kappa = 0.5 + RIDGE, (0.5 + RIDGE) / RIDGE
    start = torch.rand(10, 49, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5
    for local in epochs:
        gamma = max(8 * kappa, local)
        for spec in ("none", "outpost", "outpost:rho=0", "outpost:scale=0"):
            defense, seeds = DEFENSES.build(spec), 1 if spec in ("none", "outpost:scale=0") else 2
            curves = [_trained(problem, defense, start, local, gamma, seed) for seed in range(seeds)]
            widest = max(curve[1] for curve in curves)
            perturbed = SCALE**2 * max(curve[2] for curve in curves) ** 2 if spec.startswith("outpost") else 0.0
            perturbed = 0.0 if spec == "outpost:scale=0" else perturbed  # of one layer
            variance, length = 2 / BATCH, (math.sqrt(2) + RIDGE * widest) ** 2
            b = (variance + perturbed) / CLIENTS + 6 * smooth * apart + 8 * (local - 1) ** 2 * (perturbed + length)
            bracket = 2 * b / RIDGE + RIDGE * gamma / 2 * float((start - best).square().sum())
            for mark in MARKS:
                gap = sum(float(problem.value(curve[0][mark], whole)) for curve in curves) / len(curves) - lowest
                row = {"kind": "bound", "defense": spec, "local_steps": local, "steps": mark, "seeds": seeds}
                yield row | {"gap": gap, "bound": kappa / (gamma + mark - 1) * bracket, "heterogeneity": apart}


def _trained(
    problem: Softmax, defense: Defense, start: Tensor, local: int, gamma: float, seed: int
) -> tuple[dict[int, Tensor], float, float]:
    """The shared weights at some steps, the longest weights seen, and the largest risk."""
    module = nn.Linear(49, 10, bias=False)
    template, rng = step_of(module, problem.clients[0]), torch.Generator().manual_seed(seed)
    streams = [Stream.seeded(seed, "client", k) for k in range(CLIENTS)]
    weights, kept, widest, risk = [start] * CLIENTS, dict[int, Tensor](), float(start.norm()), 0.0
    for t in range(1, STEPS + 1):
        moved = []
        for own, weight, stream in zip(problem.clients, weights, streams, strict=True):
            some = own.take(torch.randperm(EACH, generator=rng)[:BATCH])
            step = replace(
                template, params={"weight": weight.float()}, batch=some, number=(t - 1) % local + 1, rng=stream
            )
            sent = defense.on_gradient({"weight": problem.gradient(weight, some).float()}, step)["weight"].double()
            moved.append(weight - 2 / (RIDGE * (gamma + t)) * sent)
            widest, risk = max(widest, float(weight.norm())), max(risk, float(weight.var(correction=0)))
        weights = [torch.stack(moved).mean(0)] * CLIENTS if t % local == 0 else moved
        if t in MARKS:
            kept[t] = torch.stack(moved).mean(0)
    return kept, widest, risk


def ablation(images: int = 20, candidates: int = 100) -> Iterator[Json]:
    """One option at a time, on LeNet with wide weights: what is left of one gradient, and who is found by it.

    ``identified``: the private image has the most parallel gradient of a hundred images, its label granted to all.
    """
    data = load("cifar10-samples")
    module = models.build("lenet:init=wide", data.domain, seed=0)
    own = [step_of(module, data.batch([i])).gradient() for i in range(candidates)]
    flat = torch.stack([torch.cat([g.flatten() for g in gradient.values()]) for gradient in own])
    flat = flat / flat.norm(dim=1, keepdim=True)
    options = {"scale": (0, 0.2, 0.8, 3.2, 12.8), "phi": (0, 10, 40, 100), "rho": (0, 50, 80, 95, 99)}
    for option, values in options.items():
        for value in values:
            defense = DEFENSES.build(f"outpost:{option}={value}")
            cosine, errors, found = 0.0, list[float](), 0
            for i in range(images):
                sent = defense.on_gradient(own[i], step_of(module, data.batch([i]), seed=i))
                vector = torch.cat([g.flatten() for g in sent.values()])
                cosines = flat @ (vector / vector.norm())
                cosine += float(cosines[i]) / images
                errors.append(squared(subtract(sent, own[i])) / squared(own[i]))
                found += int(cosines.argmax() == i)
            row = {"kind": "ablation", "option": option, "value": value, "cosine": cosine, "error": median(errors)}
            yield row | {"identified": found, "images": images, "candidates": candidates}
    private, recipe = data.batch(range(8)), Recipe(sends="delta", epochs=10, batch_size=4, lr=0.01)
    plain = SimulatedClient(module, recipe=recipe)
    update = plain.reply(plain.model.params, private, Stream.seeded(0)).update
    for value in (0, 0.1, 1, 10):
        client = SimulatedClient(module, recipe=recipe, defense=DEFENSES.build(f"outpost:beta={value}"))
        replies = [client.reply(plain.model.params, private, Stream.seeded(seed)) for seed in range(4)]
        cosines = [float(dot(r.update, update) / norm(r.update) / norm(update)) for r in replies]
        perturbed = sum(reply.log.means()["perturbed"] for reply in replies) / len(replies)
        row = {"kind": "ablation", "option": "beta", "value": value, "cosine": sum(cosines) / len(cosines)}
        yield row | {"local_steps": 20, "perturbed": perturbed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["equations", "bound", "ablation"])
    for part in parser.parse_args().parts:
        for row in {"equations": equations, "bound": bound, "ablation": ablation}[part]():
            print(json.dumps({name: _rounded(value) for name, value in row.items()}), flush=True)


def _rounded(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
