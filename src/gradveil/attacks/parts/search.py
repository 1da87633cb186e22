"""Searches over a batch of problems: the optimiser steps all of them at once and keeps the best point of each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from gradveil.attacks.engine import Evaluate
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Task
from gradveil.core.trees import add, map_each
from gradveil.core.types import Params

TRACED = 60

Project = Callable[[Params], Params]
"""Brings unknowns [N, ...] back into their valid set."""

Fresh = Callable[[int], Params]
"""New starting points [N, ...] for the n-th life of each problem, n from 1 on."""


@dataclass(frozen=True)
class Found:
    """The best point of each of N problems by its own objective, and how the search went."""

    unknowns: Params
    objectives: Tensor
    """[N]; infinity where no finite value was ever seen."""
    steps: tuple[int, ...]
    trace: Tensor
    """[len(steps), N]."""
    stopped: tuple[str, ...]
    """Why each search ended: budget, converged, stuck or diverged."""


class Search(Protocol):
    """Minimises N problems from ``start``."""

    @property
    def iterations(self) -> int: ...

    def run(self, evaluate: Evaluate, start: Params, project: Project, task: Task, fresh: Fresh) -> Found: ...


@dataclass(frozen=True, kw_only=True)
class Descent(ABC):
    """What first-order searches share: the schedule of the rate, and the walk."""

    iterations: int
    lr: float = 0.1
    schedule: Literal["steps", "cosine", "constant"] = "steps"
    warmup: int = 0
    signed: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    """Rates of single unknowns where they differ from ``lr``."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.lr <= 0:
            raise GradveilError("a search needs at least one iteration and a learning rate above 0")

    def rate(self, iteration: int) -> float:
        """The share of the learning rate at an iteration that counts from 0.

        ``steps`` cuts it by ten at 3/8, 5/8 and 7/8 of the iterations, ``cosine`` lets it down to zero.
        """
        if iteration < self.warmup:
            return (iteration + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "cosine":
            done = (iteration - self.warmup) / max(1, self.iterations - self.warmup)
            return 0.5 * (1 + math.cos(math.pi * done))
        return float(0.1 ** sum(iteration >= self.iterations * eighths // 8 for eighths in (3, 5, 7)))

    def run(self, evaluate: Evaluate, start: Params, project: Project, task: Task, fresh: Fresh) -> Found:  # noqa: ARG002
        best, point, step = Best(start), start, self.stepper(start)
        every = max(1, self.iterations // TRACED)
        for iteration in range(self.iterations):
            gradient, values = evaluate(point)
            best.see(point, values, iteration if iteration % every == 0 else None)
            if self.signed:
                gradient = map_each(torch.sign, gradient)
            move = step(gradient, iteration)
            rate = self.rate(iteration)
            point = project({k: x - rate * self.rates.get(k, self.lr) * move[k] for k, x in point.items()})
            task.advance(len(values))
        best.see(point, evaluate(point)[1], self.iterations)
        return best.found(["budget"] * len(best.objectives))

    @abstractmethod
    def stepper(self, start: Params) -> Callable[[Params, int], Params]:
        """A function from the gradient and the iteration to the direction to go against."""


@dataclass(frozen=True, kw_only=True)
class Adam(Descent):
    """Adam (Kingma and Ba 2015), optionally on the sign of the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def stepper(self, start: Params) -> Callable[[Params, int], Params]:
        one, two = self.betas
        first, second = map_each(torch.zeros_like, start), map_each(torch.zeros_like, start)

        def step(gradient: Params, iteration: int) -> Params:
            nonlocal first, second
            first = map_each(lambda m, g: torch.lerp(m, g, 1 - one), first, gradient)
            second = map_each(lambda v, g: torch.lerp(v, g * g, 1 - two), second, gradient)
            mean, spread = 1 / (1 - one ** (iteration + 1)), (1 - two ** (iteration + 1)) ** -0.5
            return map_each(lambda m, v: mean * m / (v.sqrt() * spread + self.epsilon), first, second)

        return step


@dataclass(frozen=True, kw_only=True)
class SGD(Descent):
    """Gradient descent with momentum."""

    momentum: float = 0.9

    def stepper(self, start: Params) -> Callable[[Params, int], Params]:
        velocity = map_each(torch.zeros_like, start)

        def step(gradient: Params, iteration: int) -> Params:  # noqa: ARG001
            nonlocal velocity
            velocity = add(gradient, velocity, self.momentum)
            return velocity

        return step


class Best:
    """The best point seen so far of each problem, kept without a copy to the host."""

    def __init__(self, start: Params) -> None:
        count = len(next(iter(start.values())))
        device = next(iter(start.values())).device
        self.unknowns = start
        self.objectives = torch.full((count,), torch.inf, device=device)
        self.last = self.objectives
        self.trace: list[tuple[int, Tensor]] = []

    def see(self, point: Params, values: Tensor, traced_at: int | None) -> None:
        """Take note of a point; NaN is never better."""
        better = values < self.objectives
        self.objectives = torch.where(better, values, self.objectives)
        self.unknowns = map_each(lambda old, new: torch.where(like(better, new), new, old), self.unknowns, point)
        self.last = values
        if traced_at is not None:
            self.trace.append((traced_at, values))

    def found(self, reasons: list[str]) -> Found:
        """What came of it; a search whose last value was not finite has diverged, whatever else it says."""
        finite = torch.isfinite(self.last).tolist()
        return Found(
            unknowns=self.unknowns,
            objectives=self.objectives,
            steps=tuple(step for step, _ in self.trace),
            trace=torch.stack([values for _, values in self.trace]),
            stopped=tuple(reason if good else "diverged" for reason, good in zip(reasons, finite, strict=True)),
        )


def like(mask: Tensor, tensor: Tensor) -> Tensor:
    """[N] shaped to be broadcast over [N, ...]."""
    return mask.view(-1, *[1] * (tensor.dim() - 1))
