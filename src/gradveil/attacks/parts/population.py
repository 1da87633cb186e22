"""Searches that need values and no slopes: each proposes many points for every problem, all valued at once."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradveil.attacks.engine import Evaluate
from gradveil.attacks.parts.search import TRACED, Found
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.progress import Task
from gradveil.core.types import Params


def for_population(tree: Any, size: int) -> Any:
    """Everything [N, ...] repeated for each member of each problem's population, [N * size, ...]."""
    return tree if size == 1 else tree_map(lambda tensor: tensor.repeat_interleave(size, dim=0), tree)


@dataclass(frozen=True, kw_only=True)
class PopulationSearch(ABC):
    """Minimises N problems with one unknown each, the ``code`` [B, latent], by values alone."""

    iterations: int
    together: int
    """How many points of each problem are valued at once."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.together < 2:
            raise GradveilError("a population search needs at least one iteration and a population of two")

    @abstractmethod
    def run(self, evaluate: Evaluate, start: Params, seeds: Sequence[int], task: Task) -> Found:
        """``evaluate`` takes points [N * together, ...], ``start`` is [N, ...]; ``seeds[i]`` decides the draws of i."""


class Kept:
    """The best code of each problem so far, and the trace of the best values."""

    def __init__(self, start: Tensor, iterations: int) -> None:
        self.codes = start.clone()
        self.values = torch.full((len(start),), torch.inf, device=start.device)
        self.trace: list[tuple[int, Tensor]] = []
        self._every = max(1, iterations // TRACED)

    def see(self, codes: Tensor, values: Tensor, iteration: int) -> None:
        """``codes`` [N, P, ...] and their values [N, P]."""
        lowest, place = values.nan_to_num(torch.inf).min(dim=1)
        better = lowest < self.values
        chosen = codes[torch.arange(len(codes), device=codes.device), place]
        self.codes = torch.where(better.view(-1, *[1] * (chosen.dim() - 1)), chosen, self.codes)
        self.values = torch.where(better, lowest, self.values)
        if iteration % self._every == 0:
            self.trace.append((iteration, self.values.clone()))

    def found(self, iterations: int) -> Found:
        self.trace.append((iterations, self.values))
        stopped = ["budget" if good else "diverged" for good in torch.isfinite(self.values).tolist()]
        return Found(
            unknowns={"code": self.codes},
            objectives=self.values,
            steps=tuple(step for step, _ in self.trace),
            trace=torch.stack([values for _, values in self.trace]),
            stopped=tuple(stopped),
        )


@dataclass(frozen=True, kw_only=True)
class Evolution(PopulationSearch):
    """CMA-ES (Hansen 2016) by pycma, one strategy for each problem, all populations valued in one batch."""

    together: int = 50
    spread: float = 1.0
    """Standard deviation of the first population around the start."""

    def run(self, evaluate: Evaluate, start: Params, seeds: Sequence[int], task: Task) -> Found:
        cma = _pycma()
        begin = start["code"]
        kept = Kept(begin, self.iterations)
        strategies = [
            cma.CMAEvolutionStrategy(
                code.flatten().double().cpu().numpy(),
                self.spread,
                # draws of its own: pycma would take numpy's global ones, and all strategies the same
                {"popsize": self.together, "seed": np.nan, "randn": _normal(seed), "verbose": -9, "verb_log": 0},
            )
            for code, seed in zip(begin, seeds, strict=True)
        ]
        for iteration in range(self.iterations):
            asked = [strategy.ask() for strategy in strategies]
            codes = torch.from_numpy(np.asarray(asked, dtype=np.float32)).to(begin.device)
            codes = codes.view(len(begin), self.together, *begin.shape[1:])
            values = evaluate({"code": codes.flatten(0, 1)})[1].view(len(begin), self.together)
            kept.see(codes, values, iteration)
            told = values.nan_to_num(1e30).double().cpu().numpy()
            for strategy, points, found in zip(strategies, asked, told, strict=True):
                strategy.tell(points, found)
            task.advance(len(begin))
        return kept.found(self.iterations)


def _normal(seed: int) -> Callable[..., Any]:
    rng = np.random.default_rng(seed)
    return lambda *shape: rng.standard_normal(shape)


def _pycma() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it misses a plotting library that nobody asks it to use
            import cma  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError:
        raise NotAvailableError("CMA-ES needs the package cma: pip install cma") from None
    return cma
