"""Searches over a batch of problems: the optimiser steps all of them at once and keeps the best point of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.engine import Evaluate
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Task
from gradveil.core.trees import add, map_each
from gradveil.core.types import Params

_TRACED = 60


@dataclass(frozen=True)
class Found:
    """The best point of each of N problems by its own objective, and how the search went."""

    unknowns: Params
    objectives: Tensor
    """[N]; infinity where no finite value was ever seen."""
    steps: tuple[int, ...]
    trace: Tensor
    """[len(steps), N]."""
    diverged: Tensor
    """[N] of bool: the last value was not finite."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam, optionally on the sign of the gradient, with the rate cut by ten at 3/8, 5/8 and 7/8 of the iterations."""

    iterations: int
    lr: float = 0.1
    signed: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.lr <= 0:
            raise GradveilError("a search needs at least one iteration and a learning rate above 0")

    def rate(self, iteration: int) -> float:
        """The learning rate at an iteration that counts from 0."""
        passed = sum(iteration >= self.iterations * eighths // 8 for eighths in (3, 5, 7))
        return float(self.lr * 0.1**passed)

    def run(self, evaluate: Evaluate, start: Params, project: Callable[[Params], Params], task: Task) -> Found:
        """Minimise from ``start`` [N, ...]; ``project`` brings unknowns back into their valid set after each step."""
        best = _Best(start)
        point, first, second = start, map_each(torch.zeros_like, start), map_each(torch.zeros_like, start)
        one, two = self.betas
        for iteration in range(self.iterations):
            gradient, values = evaluate(point)
            best.see(point, values, iteration if iteration % max(1, self.iterations // _TRACED) == 0 else None)
            if self.signed:
                gradient = map_each(torch.sign, gradient)
            first = map_each(lambda m, g: one * m + (1 - one) * g, first, gradient)
            second = map_each(lambda v, g: two * v + (1 - two) * g * g, second, gradient)
            rate, mean = self.rate(iteration), 1 / (1 - one ** (iteration + 1))
            spread = (1 - two ** (iteration + 1)) ** -0.5
            step = map_each(lambda m, v: m / (v.sqrt() * spread + self.epsilon), first, second)  # noqa: B023
            point = project(add(point, step, -rate * mean))
            task.advance(len(values))
        best.see(point, evaluate(point)[1], self.iterations)
        return best.found()


class _Best:
    """The best point seen so far of each problem, kept without a copy to the host."""

    def __init__(self, start: Params) -> None:
        count = len(next(iter(start.values())))
        device = next(iter(start.values())).device
        self.unknowns = start
        self.objectives = torch.full((count,), torch.inf, device=device)
        self.last = self.objectives
        self.trace: list[tuple[int, Tensor]] = []

    def see(self, point: Params, values: Tensor, traced_at: int | None) -> None:
        better = values < self.objectives
        self.objectives = torch.where(better, values, self.objectives)
        self.unknowns = map_each(lambda old, new: torch.where(_like(better, new), new, old), self.unknowns, point)
        self.last = values
        if traced_at is not None:
            self.trace.append((traced_at, values))

    def found(self) -> Found:
        return Found(
            unknowns=self.unknowns,
            objectives=self.objectives,
            steps=tuple(step for step, _ in self.trace),
            trace=torch.stack([values for _, values in self.trace]),
            diverged=~torch.isfinite(self.last),
        )


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (tensor.dim() - 1))
