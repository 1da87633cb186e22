"""Copies and saved files of a model, its optimizer and its guard."""

from __future__ import annotations

import copy
import pickle

import torch
from torch.nn import functional as F

from guarded import LR, Loop, Net
from misuses.table import misuse, saved


@misuse("a deep copy of the model", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin = copy.deepcopy(loop.model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    F.cross_entropy(twin(loop.inputs), loop.targets).backward()
    loop.step(optimizer, twin)


@misuse("a deep copy of the model in eval mode", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin = copy.deepcopy(loop.model).eval()
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    F.cross_entropy(twin(loop.inputs), loop.targets).backward()
    loop.step(optimizer, twin)


@misuse("a deep copy of a part of the model", "refused")
def _(loop: Loop) -> None:
    """Parts of a guarded model carry no hooks, but the guard gives no update of what a copy learned."""
    loop.protect()
    head = copy.deepcopy(loop.model.head)
    F.cross_entropy(head(torch.tanh(loop.model.first(loop.inputs))), loop.targets).backward()
    torch.optim.SGD(head.parameters(), lr=LR).step()


@misuse("a shallow copy of the model", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin = copy.copy(loop.model)
    F.cross_entropy(twin(loop.inputs), loop.targets).backward()
    loop.step(torch.optim.SGD(twin.parameters(), lr=LR), twin)


@misuse("a deep copy of model and optimizer", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin, optimizer = copy.deepcopy((loop.model, loop.optimizer))
    loop.guard.loss(twin(loop.inputs), loop.targets).backward()
    loop.step(optimizer, twin)


@misuse("a deep copy of model, optimizer and guard", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin, optimizer, guard = copy.deepcopy((loop.model, loop.optimizer, loop.guard))
    guard.loss(twin(loop.inputs), loop.targets).backward()
    loop.step(optimizer, twin)


@misuse("a shallow copy of the guard", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    guard = copy.copy(loop.guard)
    guard.loss(loop.model(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a deep copy of the optimizer", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin = copy.deepcopy(loop.optimizer)
    twin.param_groups[0]["params"] = list(loop.model.parameters())
    loop.backward()
    loop.step(twin)


@misuse("a model saved and loaded", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    (twin,) = saved(loop.model)
    F.cross_entropy(twin(loop.inputs), loop.targets).backward()
    loop.step(torch.optim.SGD(twin.parameters(), lr=LR), twin)


@misuse("a model and its optimizer saved and loaded", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin, optimizer = saved(loop.model, loop.optimizer)
    F.cross_entropy(twin(loop.inputs), loop.targets).backward()
    loop.step(optimizer, twin)


@misuse("model, optimizer and guard saved and loaded", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin, optimizer, guard = saved(loop.model, loop.optimizer, loop.guard)
    guard.loss(twin(loop.inputs), loop.targets).backward()
    loop.step(optimizer, twin)


@misuse("a pickled guard", "refused")
def _(loop: Loop) -> None:
    guard = pickle.loads(pickle.dumps(loop.protect()))
    guard.loss(loop.model(loop.inputs), loop.targets).backward()
    loop.step()


@misuse("a model of its own with the state of the guarded one", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    twin = Net()
    twin.load_state_dict(saved(loop.model.state_dict())[0])
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    loop.guard.loss(twin(loop.inputs), loop.targets).backward()
    loop.step(optimizer, twin)


@misuse("a copy trains and the guarded model gets its parameters", "refused")
def _(loop: Loop) -> None:
    loop.protect()
    loop.train()
    twin = Net()
    twin.load_state_dict(loop.model.state_dict())
    F.cross_entropy(twin(loop.inputs), loop.targets).backward()
    torch.optim.SGD(twin.parameters(), lr=LR).step()
    loop.model.load_state_dict(twin.state_dict())
