"""Wrappers, other guards and closed guards around a loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradveil
from guarded import LR, Loop, Marked, Net
from misuses.table import misuse, move


@contextmanager
def process_group() -> Iterator[None]:
    """One process, gloo, no port: the store is in memory."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@misuse("DistributedDataParallel around a guarded model", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    with process_group():
        outer = nn.parallel.DistributedDataParallel(loop.model)
        loop.guard.loss(outer(loop.inputs), loop.targets).backward()
        loop.step()


@misuse("DistributedDataParallel around a guarded model and a plain loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    with process_group():
        outer = nn.parallel.DistributedDataParallel(loop.model)
        F.cross_entropy(outer(loop.inputs), loop.targets).backward()
        loop.step()


@misuse("DistributedDataParallel given to protect", "refused")
def _(loop: Loop) -> None:
    with process_group():
        loop.protect(nn.parallel.DistributedDataParallel(loop.model))
        loop.train()


@misuse("DistributedDataParallel around the model before protect", "refused")
def _(loop: Loop) -> None:
    with process_group():
        outer = nn.parallel.DistributedDataParallel(loop.model)
        loop.protect()
        loop.guard.loss(outer(loop.inputs), loop.targets).backward()
        loop.step()


@misuse("DataParallel given to protect", "refused")
def _(loop: Loop) -> None:
    loop.protect(nn.DataParallel(loop.model))
    loop.train()


@misuse("DataParallel around a guarded model on a CPU", "defended")
def _(loop: Loop) -> None:
    loop.protect()
    around = loop.model if torch.cuda.is_available() else nn.DataParallel(loop.model)  # on a GPU, torch wants it there
    loop.guard.loss(around(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a larger model around the guarded one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    outer = nn.Sequential(loop.model, nn.Linear(3, 3))
    loop.guard.loss(outer(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("an optimizer over a larger model around the guarded one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    outer = nn.Sequential(loop.model, nn.Linear(3, 3))
    F.cross_entropy(outer(loop.inputs), loop.targets).backward()
    loop.step(torch.optim.SGD(outer.parameters(), lr=LR))


@misuse("a guard on a submodule and outputs of the whole model", "refused")
def _(loop: Loop) -> None:
    whole = loop.model
    loop.protect(whole.first)
    loop.guard.loss(whole(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a guard on a submodule and an optimizer over the whole model", "refused")
def _(loop: Loop) -> None:
    loop.protect(loop.model.first, torch.optim.SGD(loop.model.parameters(), lr=LR))
    loop.train()


@misuse("reentrant checkpointing", "refused")
def _(loop: Loop) -> None:
    class Frugal(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            out: Tensor = checkpoint(self.head, torch.tanh(hidden), use_reentrant=True)
            return out

    loop.protect(Frugal())
    loop.train()


@contextmanager
def quiet() -> Iterator[None]:
    """The compiler reads .grad of every tensor it meets, which warns where that is no leaf."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


@misuse("a compiled model made before protect", "defended")
def _(loop: Loop) -> None:
    with quiet():
        fast = torch.compile(loop.model, backend="eager")
        fast(loop.inputs)
        loop.protect()
        loop.guard.loss(fast(loop.inputs), loop.targets).backward()
        loop.step()


@misuse("a compiled model and a plain loss", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    with quiet():
        F.cross_entropy(torch.compile(loop.model, backend="eager")(loop.inputs), loop.targets).backward()
        loop.step()


@misuse("a compiled model given to protect", "defended")
def _(loop: Loop) -> None:
    with quiet():
        loop.protect(torch.compile(loop.model, backend="eager"))  # type: ignore[arg-type]
        loop.train()


@misuse("two guards on one model", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.protect(optimizer=loop.optimizer)
    loop.train()


@misuse("two guards on one model with an optimizer each", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    first = loop.guard
    loop.protect()
    first.loss(loop.model(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a guard on a model that shares parameters with a guarded one", "refused")
def _(loop: Loop) -> None:
    other = Net()
    other.first = loop.model.first
    loop.protect()
    loop.protect(other)
    loop.train()


@misuse("a guard on a part of a guarded model", "refused")
def _(loop: Loop) -> None:
    whole = loop.model
    loop.protect()
    part = whole.head
    guard = gradveil.protect(part, torch.optim.SGD(part.parameters(), lr=LR), F.cross_entropy, defense=Marked())
    guard.loss(part(torch.tanh(whole.first(loop.inputs))), loop.targets).backward()
    loop.step()


@misuse("a closed guard", "refused")
def _(loop: Loop) -> None:
    loop.protect().close()
    loop.backward()
    loop.step()


@misuse("a closed guard, bare steps, and its update", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    loop.guard.close()
    move(loop.model, loop.bare())


@misuse("a closed guard whose optimizer goes on", "refused")
def _(loop: Loop) -> None:
    with loop.protect():
        loop.train()
    loop.optimizer.zero_grad()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    loop.optimizer.step()


@misuse("momentum from bare steps between two guards", "refused")
def _(loop: Loop) -> None:
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR, momentum=0.9)
    with loop.protect(optimizer=optimizer):
        loop.train()
    loop.left.clear()  # this guard is done
    optimizer.zero_grad()
    F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
    optimizer.step()
    loop.protect(optimizer=optimizer)
    loop.train()
