"""Searches over a batch of problems: all are stepped at once, and the best point of each is kept."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.parts.objectives import per_problem
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Task
from gradveil.core.seeding import generator
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.engine import Evaluate, Plan

Schedule = Literal["steps", "cosine", "plateau"]
"""How the rate of Adam changes over the iterations."""

_TRACED = 60
_MEAN, _SPREAD, _TINY = 0.9, 0.999, 1e-8
"""Adam's two betas and its epsilon."""


@dataclass(frozen=True)
class Problems:
    """N problems that are ready to be stepped."""

    evaluate: Evaluate
    """The gradients [N, ...] and objectives [N] at a point; a population search asks for N * population of them."""
    start: Params
    """[N, ...]."""
    project: Callable[[Params], Params] = lambda unknowns: unknowns
    """Brings unknowns [N, ...] back into their valid set."""
    fresh: Callable[[int], Params] | None = None
    """New starting points [N, ...] for the n-th life of each problem, n from 1 on; None: ``start`` again."""
    seeds: Sequence[int] = ()
    """``seeds[i]`` alone decides what a search draws for problem i."""
    plan: Plan | None = None
    """How they are run."""


@dataclass(frozen=True)
class Found:
    """The best point of each of N problems by its own objective, and how the search went."""

    unknowns: Params
    objectives: Tensor
    """[N]; infinity where no finite value was ever seen."""
    steps: tuple[int, ...]
    """Iterations at which ``trace`` was read."""
    trace: Tensor
    """[len(steps), N]."""
    stopped: tuple[str, ...]
    """Why each search ended: budget, converged, stuck or diverged."""


class Best:
    """The best point seen so far of each problem, kept without a copy to the host."""

    def __init__(self, start: Params, iterations: int) -> None:
        some = next(iter(start.values()))
        self.unknowns = start
        self.objectives = torch.full((len(some),), torch.inf, device=some.device)
        self._every = max(1, iterations // _TRACED)
        self._last = self.objectives
        self._trace: list[tuple[int, Tensor]] = []

    def see(self, point: Params, values: Tensor, iteration: int, *, last: bool = False) -> None:
        """Take note of a point; NaN is never better."""
        better = values < self.objectives
        self.objectives = torch.where(better, values, self.objectives)
        self.unknowns = map_each(lambda old, new: torch.where(per_problem(better, new), new, old), self.unknowns, point)
        self._last = values
        if last or iteration % self._every == 0:
            self._trace.append((iteration, values))

    def found(self, reasons: Sequence[str] | None = None) -> Found:
        """What came of it; a search whose last value was not finite has diverged, whatever else ended it."""
        finite = torch.isfinite(self._last).tolist()
        reasons = ["budget"] * len(finite) if reasons is None else reasons
        return Found(
            unknowns=self.unknowns,
            objectives=self.objectives,
            steps=tuple(step for step, _ in self._trace),
            trace=torch.stack([values for _, values in self._trace]),
            stopped=tuple(reason if good else "diverged" for reason, good in zip(reasons, finite, strict=True)),
        )


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """Minimises N problems."""

    iterations: int
    population = 1
    """How many points of each problem are valued at once. More than one are valued without gradients."""

    @abstractmethod
    def run(self, problems: Problems, task: Task) -> Found:
        """The best point of each problem."""


@dataclass(frozen=True, kw_only=True)
class Adam(Search):
    """Adam (Kingma and Ba 2015), optionally on the sign of the gradient."""

    lr: float = 0.1
    schedule: Schedule = "steps"
    warmup: int = 0
    signed: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    """Rates of single unknowns where they differ from ``lr``."""
    noise: float = 0.0
    """Deviation of the Langevin noise that is added in each step, in units of its rate."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.lr <= 0:
            raise GradveilError("a search needs at least one iteration and a learning rate above 0")

    def rate(self, iteration: int) -> float:
        """The share of the learning rate at an iteration that counts from 0.

        ``steps`` cuts it by ten at 3/8, 5/8 and 7/8 of the iterations, ``cosine`` lets it down to zero, ``plateau``
        does so over the last quarter.
        """
        if iteration < self.warmup:
            return (iteration + 1) / self.warmup
        if self.schedule != "steps":
            begin = self.warmup if self.schedule == "cosine" else max(self.warmup, self.iterations * 3 // 4)
            done = max(0, iteration - begin) / max(1, self.iterations - begin)
            return 0.5 * (1 + math.cos(math.pi * done))
        return float(0.1 ** sum(iteration >= self.iterations * eighths // 8 for eighths in (3, 5, 7)))

    def run(self, problems: Problems, task: Task) -> Found:
        point, best = problems.start, Best(problems.start, self.iterations)
        first, second = map_each(torch.zeros_like, point), map_each(torch.zeros_like, point)
        rngs = [generator(seed, "langevin") for seed in problems.seeds] if self.noise else []
        for iteration in range(self.iterations):
            gradient, values = problems.evaluate(point)
            best.see(point, values, iteration)
            if self.signed:
                gradient = map_each(torch.sign, gradient)
            first = map_each(lambda m, g: torch.lerp(m, g, 1 - _MEAN), first, gradient)
            second = map_each(lambda v, g: torch.lerp(v, g * g, 1 - _SPREAD), second, gradient)
            mean, spread = 1 / (1 - _MEAN ** (iteration + 1)), (1 - _SPREAD ** (iteration + 1)) ** -0.5
            rate, moved = self.rate(iteration), dict[str, Tensor]()
            for name, x in point.items():
                direction = mean * first[name] / (second[name].sqrt() * spread + _TINY)
                if self.noise and name == "pixels":
                    drawn = torch.stack([torch.randn(x.shape[1:], generator=rng) for rng in rngs]).to(x)
                    direction = direction + self.noise * drawn
                moved[name] = x - rate * self.rates.get(name, self.lr) * direction
            point = problems.project(moved)
            task.advance(len(values))
        best.see(point, problems.evaluate(point)[1], self.iterations, last=True)
        return best.found()
