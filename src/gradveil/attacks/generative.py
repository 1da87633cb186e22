"""Attacks that search in a generator: GGL, GIAS and GIFD, each a composition of phases."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, cast

import torch
from torch.func import vmap

from gradveil.attacks.base import ATTACKS, Attack, Budget
from gradveil.attacks.engine import Precision, Strategy
from gradveil.attacks.latent import CodeCost, Codes, Features, OwnWeights, fitting
from gradveil.attacks.outcome import Outcome
from gradveil.attacks.parts.matching import Matching, Phase
from gradveil.attacks.parts.objectives import Cosine, Marks, Objective, Squared
from gradveil.attacks.parts.population import Evolution, PopulationSearch
from gradveil.attacks.parts.priors import Prior
from gradveil.attacks.parts.search import Adam, Search
from gradveil.attacks.parts.updates import Explanation
from gradveil.attacks.regularisers import energy, total_variation
from gradveil.attacks.turbo import TuRBO
from gradveil.core.errors import GradveilError
from gradveil.generators import Generator, build
from gradveil.threat.observation import Observation

Distance = Literal["squared", "cosine", "marks"]
_OBJECTIVES: dict[str, Objective] = {"squared": Squared(), "cosine": Cosine(), "marks": Marks()}
SHIPPED = {(3, 32, 32): "cifar10", (1, 28, 28): "mnist"}
"""The generator that ``auto`` takes for inputs of a shape."""


@ATTACKS.register("ggl")
def ggl(
    budget: Budget,
    *,
    generator: str = "auto",
    optimizer: Literal["cma", "turbo", "adam"] = "cma",
    iterations: int | None = None,
    restarts: int | None = None,
    distance: Distance = "squared",
    code: CodeCost = "kl",
    code_weight: float = 1e-3,
    limit: float | None = None,
    lr: float = 0.1,
    population: int = 50,
    aware: bool = True,
    draws: int = 0,
    match: Explanation = "simulated",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """Generative Gradient Leakage (Li et al. 2022): the code of a generator, found by CMA-ES, TuRBO or Adam."""
    if match == "surrogate" and optimizer != "adam":
        raise GradveilError(f"attack ggl: {optimizer} searches codes alone, and match=surrogate a point too: use adam")
    if limit is not None and optimizer == "turbo":
        raise GradveilError("attack ggl: turbo searches codes in [-2, 2] anyway: leave limit out, or use cma or adam")
    rounds = iterations or (budget.iterations if optimizer == "adam" else max(1, budget.iterations // 4))
    searches: dict[str, Callable[[], Search | PopulationSearch]] = {
        "cma": lambda: Evolution(iterations=rounds, together=population),
        "turbo": lambda: TuRBO(iterations=rounds),
        "adam": lambda: Adam(iterations=rounds, lr=lr),
    }
    return Matching(
        title=f"GGL with {optimizer}",
        objective=_OBJECTIVES[distance],
        search=searches[optimizer](),
        restarts=restarts or budget.restarts,
        prior=_codes(generator, code, code_weight, limit),
        aware=aware,
        draws=draws,
        explanation=match,
        strategy=strategy,
        precision=precision,
    )


@ATTACKS.register("gias")
def gias(
    budget: Budget,
    *,
    generator: str = "auto",
    iterations: int | None = None,
    restarts: int | None = None,
    code_lr: float = 3e-2,
    weight_lr: float = 1e-3,
    tv: float = 1e-6,
    aware: bool = False,
    draws: int = 0,
    match: Explanation = "simulated",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """Gradient Inversion with Alternative Spaces (Jeon et al. 2021): a code first, then a generator of one's own.

    An eighth of the iterations goes to the code, the rest to the weights.
    """
    rounds = iterations or budget.iterations
    weights = Phase(
        search=Adam(iterations=max(1, rounds - rounds // 8), lr=weight_lr),
        prior=_own_weights,
        regularisers=((tv, total_variation),),
    )
    return Matching(
        title="GIAS",
        objective=Cosine(),
        search=Adam(iterations=max(1, rounds // 8), lr=code_lr),
        restarts=restarts or budget.restarts,
        prior=_codes(generator, "none", 0.0, None),
        regularisers=((tv, total_variation),),
        later=(weights,),
        aware=aware,
        draws=draws,
        explanation=match,
        strategy=strategy,
        precision=precision,
    )


@ATTACKS.register("gifd")
def gifd(
    budget: Budget,
    *,
    generator: str = "auto",
    iterations: int | None = None,
    restarts: int | None = None,
    lr: float = 0.1,
    radius: float = 0.1,
    tv: float = 1e-4,
    norm: float = 1e-6,
    stages: int = 3,
    aware: bool = False,
    draws: int = 0,
    match: Explanation = "simulated",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """Gradient Inversion over Feature Domains (Fang et al. 2023): the code, then features stage by stage in an l1 ball.

    ``radius`` is per entry of the features: a stage of d entries gets a ball of radius * d. The iterations are shared
    equally by the code and the ``stages`` after it.
    """
    if stages < 0:
        raise GradveilError(f"attack gifd: stages is at least 0, not {stages}")
    each = max(1, (iterations or budget.iterations) // (stages + 1))
    smooth = ((tv, total_variation), (norm, energy))
    search = Adam(iterations=each, lr=lr, schedule="cosine", warmup=max(1, each // 20))
    later = tuple(Phase(search=search, prior=_features(k, radius), regularisers=smooth) for k in range(1, stages + 1))
    return Matching(
        title="GIFD",
        objective=Cosine(),
        search=search,
        restarts=restarts or budget.restarts,
        prior=_before_stages(_codes(generator, "none", 0.0, None), stages),
        regularisers=smooth,
        later=later,
        aware=aware,
        draws=draws,
        explanation=match,
        strategy=strategy,
        precision=precision,
    )


PriorOf = Callable[[Observation, Outcome | None], Prior]


def _codes(spec: str, cost: CodeCost, weight: float, limit: float | None) -> PriorOf:
    def prior(one: Observation, _: Outcome | None) -> Prior:
        device = next(iter(one.sent.values())).device
        name = SHIPPED.get(one.domain.shape) if spec == "auto" else spec
        if name is None:
            raise GradveilError(
                f"no generator is shipped for inputs of {'x'.join(map(str, one.domain.shape))}: choose one with "
                "generator=, such as one trained with `gradveil generator train`"
            )
        return Codes(fitting(_loaded(name, device), one.domain), device, cost=cost, weight=weight, limit=limit)

    return prior


@cache
def _loaded(spec: str, device: torch.device) -> Generator:
    return build(spec).to(device)


def _before_stages(codes: PriorOf, stages: int) -> PriorOf:
    """The same codes, of a generator that has so many stages after its code."""

    def prior(one: Observation, outcome: Outcome | None) -> Prior:
        first = cast(Codes, codes(one, outcome))
        most = len(first.generator.stages) - 1
        if stages > most:
            raise GradveilError(f"attack gifd: stages={stages}, but the generator has {most} after its code: use fewer")
        return first

    return prior


def _own_weights(_: Observation, outcome: Outcome | None) -> Prior:
    first, found = _first(outcome)
    return OwnWeights(first.generator, first.code(found))


def _features(stage: int, radius: float) -> PriorOf:
    """The features that enter a stage, from what the phase before found."""

    def prior(_: Observation, outcome: Outcome | None) -> Prior:
        assert outcome is not None
        before, found = outcome.prior, outcome.found.unknowns
        generator = cast(Codes | Features, before).generator
        name = generator.stages[stage]
        with torch.no_grad():
            center = vmap(lambda u, given: _entering(before, name, u, given["labels"]))(found, outcome.given)
        return Features(generator, name, center, radius * center[0, 0].numel())

    return prior


def _entering(before: Prior, stage: str, unknowns: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """The features that enter a stage when the prior of the phase before decodes its unknowns."""
    if isinstance(before, Codes):
        return before.generator.until(before.code(unknowns), stage, labels)
    assert isinstance(before, Features)
    return before.generator.between(unknowns["features"], before.stage, stage, labels)


def _first(outcome: Outcome | None) -> tuple[Codes, dict[str, torch.Tensor]]:
    assert outcome is not None
    assert isinstance(outcome.prior, Codes)
    return outcome.prior, outcome.found.unknowns
