"""Updates, broadcasts, marks and checkpoints at the wrong moment or of the wrong kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gradveil
from guarded import LR, Loop, Marked, Net
from misuses.table import misuse, move


@misuse("an update before any step", "refused")
def _(loop: Loop) -> None:
    loop.protect().update()


@misuse("an update between backward and step", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    loop.guard.update()


@misuse("a gradient before any backward pass", "refused")
def _(loop: Loop) -> None:
    loop.protect().gradient()


@misuse("training on after the update", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.guard.update()
    loop.train()


@misuse("a step after the update", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.optimizer.zero_grad()
    loop.backward()
    loop.guard.update()
    loop.step()


def _broadcasts() -> Iterator[tuple[str, Callable[[dict[str, Any]], Any]]]:
    yield "lacks a parameter", lambda b: {n: t for n, t in b.items() if n != "head.bias"}
    yield "has a parameter of another shape", lambda b: {**b, "head.bias": torch.zeros(4)}
    yield "has a parameter that would broadcast", lambda b: {**b, "head.bias": torch.zeros(1)}
    yield "holds NaN", lambda b: {**b, "head.bias": torch.full((3,), float("nan"))}
    yield "holds infinity", lambda b: {**b, "head.weight": torch.full((3, 5), float("inf"))}
    yield "holds complex numbers", lambda b: {**b, "head.bias": torch.zeros(3, dtype=torch.complex64)}
    yield "holds a list", lambda b: {**b, "head.bias": [0.0, 0.0, 0.0]}
    yield "holds a sparse tensor", lambda b: {**b, "head.weight": torch.zeros(3, 5).to_sparse()}
    yield "holds a meta tensor", lambda b: {**b, "head.weight": torch.zeros(3, 5, device="meta")}
    yield "is a list", lambda b: list(b.values())
    yield "is a model", lambda _: Net()
    yield "is nothing", lambda _: None
    yield "has names of a wrapper", lambda b: {f"module.{n}": t for n, t in b.items()}


for _name, _made in _broadcasts():

    def _wrong_broadcast(loop: Loop, made: Callable[[dict[str, Any]], Any] = _made) -> None:
        loop.protect()
        loop.train()
        before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
        try:
            loop.guard.new_round(made(loop.broadcast))
        finally:
            assert all(torch.equal(before[name], p) for name, p in loop.model.named_parameters()), "half loaded"

    misuse(f"a broadcast that {_name}", "refused", under=("marks",))(_wrong_broadcast)


@misuse("a broadcast edited after it was loaded", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    broadcast = {name: tensor.clone() for name, tensor in loop.broadcast.items()}
    loop.guard.new_round(broadcast)
    loop.train()
    for tensor in broadcast.values():
        tensor.add_(torch.rand_like(tensor))


@misuse("an update edited by the loop and asked for again", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    for name, tensor in loop.guard.update().items():
        tensor.add_(loop.bare()[name])


@misuse("a gradient edited by the loop and then stepped", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    loop.backward()
    for name, tensor in loop.guard.gradient().items():
        tensor.add_(loop.bare()[name])
    loop.step()


@misuse("a checkpoint taken after a bare edit", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    move(loop.model, loop.bare())
    loop.guard.restore(loop.guard.checkpoint())


@misuse("statistics of batch norm", "defended")
def _(loop: Loop) -> None:
    """They are of the private examples, and no defense has seen them: they stay as the server sent them."""
    loop.protect(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)))
    loop.train()


@misuse("a checkpoint of a model with other shapes", "refused")
def _(loop: Loop) -> None:
    other = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(other.parameters(), lr=LR)
    made = gradveil.protect(other, optimizer, F.cross_entropy, defense=Marked()).checkpoint()
    loop.protect()
    loop.train()
    loop.guard.restore(made)


@misuse("a dictionary that is no checkpoint", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.guard.restore({"model": loop.model.state_dict()})


@misuse("a checkpoint that lacks a parameter", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    made = loop.guard.checkpoint()
    for part in made.values():
        if isinstance(part, dict):
            part.pop("head.bias", None)
    loop.guard.restore(made)


@misuse("a checkpoint made under another defense", "refused")
def _(loop: Loop) -> None:
    """Its parameters hold steps that this defense never saw."""
    loop.protect(defense="none")
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()
    made = loop.guard.checkpoint()
    loop.guard.close()
    loop.protect(Net())
    loop.guard.restore(made)


@misuse("a state edited by the loop and asked for again", "defended")
def _(loop: Loop) -> None:
    loop.protect(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    loop.train()
    for tensor in loop.guard.state_dict().values():
        tensor.add_(torch.rand(tensor.shape).to(tensor.dtype))


@misuse("statistics of batch norm after a broadcast without buffers", "defended")
def _(loop: Loop) -> None:
    """What training made of the statistics in the first round must not leave as the broadcast's in the second."""
    loop.protect(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)))
    loop.train()
    loop.guard.update()
    loop.guard.new_round({name: loop.broadcast[name] for name, _ in loop.model.named_parameters()})
    loop.train()


@misuse("statistics of batch norm after a checkpoint", "defended")
def _(loop: Loop) -> None:
    loop.protect(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)))
    loop.train()
    loop.guard.restore(loop.guard.checkpoint())
    loop.train()


@misuse("a broadcast with a buffer of another shape", "refused")
def _(loop: Loop) -> None:
    loop.protect(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    loop.train()
    loop.guard.new_round({**loop.broadcast, "1.running_mean": torch.zeros(4)})


@misuse("a checkpoint of a wider model with the same names", "refused")
def _(loop: Loop) -> None:
    wide = Net()
    wide.first, wide.head = nn.Linear(6, 9), nn.Linear(9, 3)
    optimizer = torch.optim.SGD(wide.parameters(), lr=LR)
    made = gradveil.protect(wide, optimizer, F.cross_entropy, defense=Marked()).checkpoint()
    loop.protect()
    loop.train()
    loop.guard.restore(made)
