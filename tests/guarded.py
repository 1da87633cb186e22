"""What the two tables of guarded loops share: tiny models, tiny data, and a checker of what left a loop.

The checker needs no reference run. ``Marked`` replaces every gradient by ones, so a defended step moves all entries of
a parameter alike. The bare gradient never does. Under heavy noise a defended step is far larger than a bare one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from gradveil.core.errors import GradveilError
from gradveil.defenses import Defense

LR = 0.125
SIGMA = 1000.0
NOISE = f"noise:sigma={SIGMA}"


class Marked(Defense):
    """Every entry of every gradient becomes 1."""

    several_inputs = True

    def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]  # noqa: ARG002
        return {name: torch.ones_like(tensor) for name, tensor in gradient.items()}


class Net(nn.Module):
    """53 parameters in two layers with names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.first(inputs)))
        return out


def examples(seed: int = 0, n: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs [n, 6] and targets [n] of three classes."""
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(n, 6, generator=rng), torch.randint(3, (n,), generator=rng)


def gradient_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The bare gradient by name; the model is neither called nor changed, and its grad fields stay as they are."""
    plain = Net()
    plain.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
    F.cross_entropy(plain(inputs), targets).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


@dataclass
class Left:
    """Tensors that left a loop, as differences to the broadcast, and the least size of one defended step."""

    how: str
    change: dict[str, Tensor]
    least: float


class Loop:
    """A user's loop under ``protect``. Every entry of the table gets one that is not yet protected."""

    def __init__(self, defense: str | Defense) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.inputs, self.targets = examples()
        self.defense = defense
        self.least = LR * (1e-3 * SIGMA if defense == NOISE else 0.9)
        self.left: list[Left] = []
        self.guard: gradveil.Guard
        self.optimizer: torch.optim.Optimizer

    def protect(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        defense: str | Defense | None = None,
    ) -> gradveil.Guard:
        """By default the small model, SGD without momentum, cross-entropy and the defense of this run."""
        self.model = model = self.model if model is None else model
        self.broadcast = copy.deepcopy(model.state_dict())
        chosen = torch.optim.SGD(model.parameters(), lr=LR) if optimizer is None else optimizer
        self.optimizer = chosen if isinstance(chosen, torch.optim.Optimizer) else chosen[0]
        self.guard = gradveil.protect(model, chosen, loss, defense=defense or self.defense)
        return self.guard

    def backward(self) -> None:
        self.guard.loss(self.model(self.inputs), self.targets).backward()

    def step(self, optimizer: torch.optim.Optimizer | None = None, model: nn.Module | None = None) -> None:
        """Step; a step that is not refused may be followed by sending the parameters, or the gradients it used."""
        (optimizer or self.optimizer).step()
        self.send(model or self.model)
        used = {name: p.grad.clone() for name, p in (model or self.model).named_parameters() if p.grad is not None}
        self.left.append(Left("p.grad after a step", used, self.least / LR))

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.backward()
            self.step()

    def bare(self) -> dict[str, Tensor]:
        """The gradient that must not leave, at the parameters as they are."""
        return gradient_of(self.model, self.inputs, self.targets)

    def send(self, model: nn.Module) -> None:
        """The loop sends the parameters of a model."""
        now = {name: p.detach() for name, p in model.named_parameters()}
        self.left.append(Left("model.state_dict()", self._change(now), self.least))

    def ask(self) -> list[GradveilError]:
        """The loop sends everything that the guard gives. What it refuses does not leave, and is returned."""
        refused: list[GradveilError] = []
        asks: dict[str, Callable[[], dict[str, Tensor]]] = {
            "guard.gradient()": lambda: self.guard.gradient(),
            "guard.update()": lambda: self.guard.update(),
            "guard.state_dict()": lambda: self._change(self.guard.state_dict()),
        }
        for how, call in asks.items():
            try:
                change = {name: tensor.clone() for name, tensor in call().items()}
            except GradveilError as error:
                refused.append(error)
            else:
                self.left.append(Left(how, change, self.least / LR if how == "guard.gradient()" else self.least))
        return refused

    def bareness(self) -> str | None:
        """Which tensor left in another way than the defense demands, if any."""
        for left in self.left:
            for name, change in left.change.items():
                if problem := self._problem(change.detach().double(), left.least):
                    return f"{name} in {left.how}: {problem}"
        return None

    def _problem(self, change: Tensor, least: float) -> str | None:
        if not change.any():
            return None
        if self.defense == NOISE:
            size = float(change.square().mean().sqrt())
            return None if size > least else f"moved by {size:.2g}, so without noise"
        centre = float(change.mean())
        if float((change - centre).abs().max()) > 1e-4:
            return "entries moved apart, so by more than the defense"
        return None if abs(centre) > least else f"moved by {centre:.2g}, which is too little"

    def _change(self, now: dict[str, Any]) -> dict[str, Tensor]:
        """To the broadcast. A tensor that was not in it, or in another shape, counts as it is."""
        return {
            name: tensor - self.broadcast[name]
            if name in self.broadcast and tensor.shape == self.broadcast[name].shape
            else tensor
            for name, tensor in now.items()
        }
