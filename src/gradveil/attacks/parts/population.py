"""Searches that need values and no gradients: each proposes many points for every problem, all valued at once.

CMA-ES (Hansen 2016) by pycma, and TuRBO-1 (Eriksson et al. 2019) on botorch: Bayesian optimisation inside a trust
region that grows and shrinks. For TuRBO one Gaussian process is fitted for all problems together, as a batch of
independent ones. A problem whose region has shrunk to nothing starts with a full one around its best point and keeps
what it has learnt.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks.parts.search import Best, Found, Problems, Search
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.progress import Task
from gradveil.core.seeding import generator

_LONGEST, _SHORTEST, _FIRST = 1.6, 0.5**7, 0.8
_SUCCESSES = 3


@dataclass(frozen=True, kw_only=True)
class PopulationSearch(Search):
    """Minimises N problems with one unknown each, the ``code`` [B, latent], by values alone."""

    population: int

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.population < 2:
            raise GradveilError("a population search needs at least one iteration and a population of two")

    def _valued(self, problems: Problems, codes: Tensor, best: Best, iteration: int) -> Tensor:
        """The values [N, P] of codes [N, P, B, latent]; the lowest of each problem is taken note of."""
        values = problems.evaluate({"code": codes.flatten(0, 1)})[1].view(codes.shape[:2])
        lowest, place = values.nan_to_num(torch.inf).min(dim=1)
        chosen = codes[torch.arange(len(codes), device=codes.device), place]
        best.see({"code": chosen}, torch.minimum(lowest, best.objectives), iteration)
        return values

    def _found(self, best: Best) -> Found:
        best.see(best.unknowns, best.objectives, self.iterations, last=True)
        return best.found()


@dataclass(frozen=True, kw_only=True)
class Evolution(PopulationSearch):
    """CMA-ES, one strategy for each problem, all populations valued in one batch."""

    population: int = 50
    spread: float = 1.0
    """Standard deviation of the first population around the start."""

    def run(self, problems: Problems, task: Task) -> Found:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it misses a plotting library that nobody asks it to use
                import cma  # type: ignore[import-untyped, unused-ignore]
        except ModuleNotFoundError:
            raise NotAvailableError("CMA-ES needs the package cma: pip install cma") from None
        start, best, strategies = problems.start["code"], Best(problems.start, self.iterations), []
        for code, seed in zip(start, problems.seeds, strict=True):
            rng = np.random.default_rng(seed)
            # draws of its own: pycma would take numpy's global ones, and all strategies the same
            own = {"seed": np.nan, "randn": lambda *shape, rng=rng: rng.standard_normal(shape)}
            options = {"popsize": self.population, "verbose": -9, "verb_log": 0, **own}
            strategies.append(cma.CMAEvolutionStrategy(code.flatten().double().cpu().numpy(), self.spread, options))
        for iteration in range(self.iterations):
            asked = [strategy.ask() for strategy in strategies]
            codes = torch.from_numpy(np.asarray(asked, dtype=np.float32)).to(start.device)
            codes = codes.view(len(start), self.population, *start.shape[1:])
            values = self._valued(problems, codes, best, iteration)
            told = values.nan_to_num(1e30).double().cpu().numpy()
            for strategy, points, each in zip(strategies, asked, told, strict=True):
                strategy.tell(points, each)
            task.advance(len(start))
        return self._found(best)


@dataclass(frozen=True, kw_only=True)
class TuRBO(PopulationSearch):
    """Codes with entries between -``box`` and ``box``; ``population`` points a round, after ``initial`` random ones."""

    population: int = 10
    initial: int = 256
    box: float = 2.0
    remembered: int = 512
    """The process is fitted to so many of the points, the best ones."""
    refit: int = 5
    """Length scales are learnt anew every so many rounds."""
    candidates: int = 512
    margin: float = 0.0
    """A round is a success where it is better by more than this share of the best value."""
    latin: bool = False
    """The random points are a Latin hypercube: along each axis they fall into as many different parts."""

    @classmethod
    def published(cls, *, evaluations: int) -> Self:
        """As TuRBO-1's authors have it: so many points in all, 256 at first, then ten a round.

        A region that has shrunk to nothing begins anew there. In 128 dimensions that takes 91 rounds of failures, which
        GGL's 1,000 points do not have.
        """
        rounds = max(1, evaluations // 10)
        return cls(iterations=rounds, remembered=evaluations, refit=1, candidates=5000, margin=1e-3, latin=True)

    def run(self, problems: Problems, task: Task) -> Found:
        _botorch()
        start = problems.start["code"]
        count, d = len(start), start[0].numel()
        best, region = Best(problems.start, self.iterations), _Regions(count, d, start.device, self.population)
        rngs = [generator(seed, "turbo") for seed in problems.seeds]
        first = min(self.initial, max(2 * self.population, self.iterations * self.population // 2))
        rounds = math.ceil(first / self.population)
        drawn = torch.stack([self._first(rounds * self.population, d, rng) for rng in rngs]).to(start)
        points, values = torch.empty(count, 0, d, device=start.device), start.new_empty(count, 0)
        model: Any = None
        for iteration in range(self.iterations):
            if iteration < rounds:
                asked = drawn[:, iteration * self.population : (iteration + 1) * self.population]
            else:
                order = values.argsort(dim=1)[:, : self.remembered]
                some, known = points.gather(1, order[..., None].expand(-1, -1, d)), values.gather(1, order)
                if model is None or (iteration - rounds) % self.refit == 0:
                    model = _fitted(some, known, model)
                asked = self._proposed(model, some, known, region, rngs)
            codes = ((2 * asked - 1) * self.box).view(count, self.population, *start.shape[1:])
            found = self._valued(problems, codes, best, iteration)
            if iteration >= rounds:
                lowest = values.min(dim=1).values
                region.learn(found.min(dim=1).values < lowest - self.margin * lowest.abs())
            finite = found.nan_to_num(float(values.max()) if values.numel() else 1e6)
            points, values = torch.cat([points, asked], dim=1), torch.cat([values, finite], dim=1)
            task.advance(count)
        return self._found(best)

    def _first(self, count: int, d: int, rng: torch.Generator) -> Tensor:
        """Random points [count, d] of the unit cube."""
        points = torch.rand((count, d), generator=rng)
        if not self.latin:
            return points
        places = torch.stack([torch.randperm(count, generator=rng) for _ in range(d)], dim=1)
        return (places + points) / count

    def _proposed(
        self, model: Any, points: Tensor, values: Tensor, region: _Regions, rngs: list[torch.Generator]
    ) -> Tensor:
        """A sample of the process on random candidates in each region: the lowest points of several such samples."""
        center = points[torch.arange(len(points)), values.argmin(dim=1)][:, None]
        scales = model.covar_module.lengthscale.detach().to(points)
        scales = (scales / scales.log().mean(dim=-1, keepdim=True).exp()).view(len(points), 1, -1)
        reach = 0.5 * region.length.view(-1, 1, 1) * scales
        low, high = (center - reach).clamp(0, 1), (center + reach).clamp(0, 1)
        d = points.shape[-1]
        drawn = torch.stack([torch.rand((self.candidates, 2 * d), generator=rng) for rng in rngs]).to(points)
        moved = drawn[..., d:] < min(1.0, 20 / d)  # in high dimension, move few coordinates at a time
        candidates = torch.where(moved, low + (high - low) * drawn[..., :d], center)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of matrices that needed a little more on their diagonal
            # in parts: their draws are independent, and the covariance of all of them would fill the memory
            each = [model.posterior(some.double()) for some in torch.split(candidates, 512, dim=1)]
            mean = torch.cat([posterior.mean[..., 0] for posterior in each], dim=1)
            root = torch.cat([posterior.variance[..., 0] for posterior in each], dim=1).clamp_min(0).sqrt()
        noise = torch.stack([torch.randn((self.population, self.candidates), generator=rng) for rng in rngs])
        samples = mean[:, None] + root[:, None] * noise.to(mean)  # the model is of minus the standardised value
        chosen = samples.argmax(dim=-1)
        return candidates.gather(1, chosen[..., None].expand(-1, -1, d))


class _Regions:
    """The side of each problem's trust region: doubled after some successes in a row, halved after some failures."""

    def __init__(self, count: int, dimension: int, device: torch.device, batch: int) -> None:
        self.length = torch.full((count,), _FIRST, device=device)
        self.won, self.lost = torch.zeros_like(self.length), torch.zeros_like(self.length)
        self.failures = math.ceil(max(4 / batch, dimension / batch))

    def learn(self, better: Tensor) -> None:
        self.won = torch.where(better, self.won + 1, 0)
        self.lost = torch.where(better, 0, self.lost + 1)
        grow, shrink = self.won >= _SUCCESSES, self.lost >= self.failures
        self.length = torch.where(grow, (2 * self.length).clamp_max(_LONGEST), self.length)
        self.length = torch.where(shrink, self.length / 2, self.length)
        self.won, self.lost = torch.where(grow, 0, self.won), torch.where(shrink, 0, self.lost)
        self.length = torch.where(self.length < _SHORTEST, _FIRST, self.length)


def _fitted(points: Tensor, values: Tensor, before: Any) -> Any:
    """A batch of Gaussian processes with a length scale for every coordinate, of minus the standardised values."""
    botorch, gpytorch = _botorch()
    targets = -(values - values.mean(dim=1, keepdim=True)) / values.std(dim=1, keepdim=True).clamp_min(1e-12)
    shape = torch.Size([len(points)])
    constraint = gpytorch.constraints.Interval
    kernel = gpytorch.kernels.MaternKernel(
        nu=2.5,
        ard_num_dims=points.shape[-1],
        batch_shape=shape,
        lengthscale_constraint=constraint(0.005, 4.0),
    )
    noise = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint(5e-4, 0.2), batch_shape=shape)
    model = botorch.models.SingleTaskGP(
        points.double(), targets.double()[..., None], covar_module=kernel, likelihood=noise, outcome_transform=None
    ).to(points.device)
    if before is not None:
        model.covar_module.load_state_dict(before.covar_module.state_dict())
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(30 if before is None else 10):
            optimizer.zero_grad()
            loss = -likelihood(model(*model.train_inputs), model.train_targets).sum()
            loss.backward()
            optimizer.step()
    return model.eval()


def _botorch() -> tuple[Any, Any]:
    try:
        import botorch  # type: ignore[import-untyped, unused-ignore]
        import gpytorch  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError:
        raise NotAvailableError("TuRBO needs the package botorch: pip install 'gradveil[turbo]'") from None
    return botorch, gpytorch
