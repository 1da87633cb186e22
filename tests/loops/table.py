"""The table of legitimate loops, and one run of a loop with a guard or without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from guarded import LR, Net, examples

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]

BATCHES = [examples(seed) for seed in range(3)]


@dataclass
class Run:
    """One run of a loop. The same calls work without a guard, as far as they can mean something there."""

    defense: str | None
    loss: Loss = F.cross_entropy
    model: nn.Module = field(default_factory=Net)
    guard: gradveil.Guard | None = None
    figures: list[Any] = field(default_factory=list)
    """What the loop measured. It must be the same with a guard that has no defense."""

    def protect(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        loss: Loss = F.cross_entropy,
    ) -> Any:
        """The optimizer, which is SGD with momentum by default."""
        self.model, self.loss = model, loss
        self.broadcast = copy.deepcopy(model.state_dict())
        if optimizer is None:
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)
        if self.defense is not None:
            self.guard = gradveil.protect(model, optimizer, loss, defense=self.defense)
            self.loss = self.guard.loss
        return optimizer

    def train(
        self, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]] = BATCHES, **zero: bool
    ) -> None:
        """The loop that everybody writes."""
        for inputs, targets in batches:
            optimizer.zero_grad(**zero)
            loss = self.loss(self.model(inputs), targets)
            loss.backward()
            optimizer.step()
            self.figures.append(loss.item())

    def use(self, *optimizers: torch.optim.Optimizer) -> None:
        if self.guard:
            self.guard.use(*optimizers)

    def update(self) -> dict[str, Tensor]:
        if self.guard:
            return self.guard.update()
        return {name: p.detach() - self.broadcast[name] for name, p in self.model.named_parameters()}

    def new_round(self, broadcast: Mapping[str, Tensor]) -> None:
        if self.guard:
            self.guard.new_round(broadcast)
        else:
            self.model.load_state_dict(dict(broadcast), strict=False)
        self.broadcast = copy.deepcopy(self.model.state_dict())

    def checkpoint(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.guard:
            return self.guard.checkpoint()
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": optimizer.state_dict()})

    def restore(self, state: Any, optimizer: torch.optim.Optimizer) -> None:
        if self.guard:
            self.guard.restore(state)
        else:
            self.model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])


@dataclass(frozen=True)
class Entry:
    name: str
    loop: Callable[[Run], None]
    slow: bool


TABLE: list[Entry] = []


def loop(name: str, *, slow: bool = False) -> Callable[[Any], Any]:
    """Enter a function into the table."""

    def enter(function: Callable[[Run], None]) -> Callable[[Run], None]:
        TABLE.append(Entry(name, function, slow))
        return function

    return enter
