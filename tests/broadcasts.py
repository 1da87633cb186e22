"""Broadcasts to inspect: honest ones of every kind, and those that the shipped attacks craft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from gradveil import models
from gradveil.attacks import ATTACKS, BUDGETS, Server
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.trees import add, detached
from gradveil.core.types import Batch, Params, Recipe
from gradveil.data import ImageSet, load
from gradveil.defenses import DEFENSES
from interrogation import interrogated

CIFAR, DIGITS = load("cifar10-samples"), load("mnist-samples")
FEDAVG = Recipe(sends="delta", lr=0.1, epochs=2, batch_size=3)
QUICK = {"dcs2": "dcs2:iterations=1", "dcs2plus": "dcs2plus:iterations=1"}
SMALL = ("lenet", "mlp", "convnet:width=8", "vit:depth=1,dim=48")
LARGE = ("resnet18", "resnet34", "resnet50", "vgg11", "vgg16")
INITIAL = (
    *SMALL, "lenet:init=wide", "mlp:normalize=true", "mlp:activation=sigmoid", "mlp:hidden=32,depth=3", "mlp:depth=0",
    "mlp:hidden=16,depth=1", "convnet:width=8,batch_norm=false", "imprint:bins=64 > lenet",
)  # fmt: skip


class Sent(NamedTuple):
    """One broadcast, and what a client knows that gets it."""

    what: str
    module: nn.Module
    params: Params
    data: ImageSet
    previous: Params | None = None
    recipe: Recipe | None = None


def initial(specs: tuple[str, ...] = INITIAL, seeds: int = 3) -> Iterator[Sent]:
    for data in (CIFAR, DIGITS):
        for spec in specs:
            for seed in range(seeds):
                module = models.build(spec, data.domain, seed=seed)
                yield Sent(f"{spec} {data.name} seed {seed}", module, parameters(module), data)


def trained(specs: tuple[str, ...] = ("lenet:init=wide", "mlp", "convnet:width=8")) -> Iterator[Sent]:
    """Models on their way: after 5, 10, 20 and 40 steps on all samples."""
    for data in (CIFAR, DIGITS):
        batch = data.batch(range(100))
        for spec in specs:
            module = models.build(spec, data.domain, seed=0).train()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
            for step in range(1, 41):
                part = batch.take(slice(step * 10 % 100, step * 10 % 100 + 10))
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(part.inputs), part.labels).backward()
                optimizer.step()
                if step in (5, 10, 20, 40):
                    yield Sent(f"{spec} {data.name} after {step} steps", module, parameters(module), data)


def rounds(model: str, recipe: Recipe, *, count: int, defenses: tuple[str, ...] = tuple(DEFENSES)) -> Iterator[Sent]:
    """What an honest server sends after each round of two clients, under each defense."""
    for name in defenses:
        defense = DEFENSES.build(QUICK.get(name, name))
        module = defense.on_model(models.build(model, CIFAR.domain, seed=0))
        client, sent = SimulatedClient(module, recipe=recipe, defense=defense), parameters(module)
        for number in range(count):
            replies = [client.reply(sent, _shard(k), Stream.seeded(number, k)).update for k in range(2)]
            previous = sent
            for update in replies:
                sent = add(sent, update, (1 if recipe.sends == "delta" else -recipe.lr) / 2)
            yield Sent(f"{model} {recipe.sends} {name} round {number}", module, sent, CIFAR, previous, recipe)


def imprinted(specs: tuple[str, ...]) -> Iterator[Sent]:
    for query in ("mean", "dct", "random"):
        for quantiles in ("public", "normal", "laplace"):
            for variant in ("fedsgd", "sparse"):
                attack = f"imprint:bins=32,query={query},quantiles={quantiles},variant={variant}"
                yield from (crafted(attack, spec, data) for spec in specs for data in (CIFAR, DIGITS))


def trapped() -> Iterator[Sent]:
    for spec in ("mlp", "mlp:normalize=true", "mlp:hidden=16,depth=1", "mlp:activation=relu,depth=3"):
        for attack in ("trap", "trap:scale=0.99", "trap:scale=0.8,sigma=0.01"):
            yield from (crafted(attack, spec, data) for data in (CIFAR, DIGITS))


def fished(specs: tuple[str, ...]) -> Iterator[Sent]:
    """Every question that Fishing asks a client with three examples of each of four classes."""
    batch = CIFAR.batch([i for label in range(4) for i in torch.where(CIFAR.labels == label)[0][:3].tolist()])
    for spec in specs:
        for strategy in ("class", "feature"):
            attack = ATTACKS.build(f"fishing:strategy={strategy}", BUDGETS["quick"])
            last = interrogated(attack, batch, model=spec)
            for number, seen in enumerate((*last.earlier, last)):
                yield Sent(f"fishing {strategy} {spec} question {number}", seen.module, seen.sent, CIFAR)


def crafted(attack: str, model: str, data: ImageSet) -> Sent:
    module = models.build(model, data.domain, seed=0)
    server = Server(module, model, parameters(module), data.domain, data.batch(range(50)))
    made = ATTACKS.build(attack, BUDGETS["quick"]).craft(server, [], seed=0)
    assert made is not None
    return Sent(f"{attack} {model} {data.name}", made.module, made.sent, data)


def parameters(module: nn.Module) -> Params:
    return detached(dict(module.named_parameters()))


def _shard(number: int) -> Batch:
    return CIFAR.batch(range(6 * number, 6 * number + 6))
