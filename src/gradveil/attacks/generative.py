"""Attacks that search in a generator: GGL, GIAS and GIFD, each a composition of phases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.attacks.base import ATTACKS
from gradveil.attacks.parts.counter import Averages
from gradveil.attacks.parts.matching import Matching, Phase, PhaseResult, Pruned
from gradveil.attacks.parts.objectives import Cosine, Objective, OrthogonalObjective, Squared, energy, roughness
from gradveil.attacks.parts.population import Evolution, TuRBO
from gradveil.attacks.parts.priors import CodeCost, Codes, Condition, Features, OwnWeights, Prior
from gradveil.attacks.parts.search import Adam, Schedule, Search
from gradveil.core.errors import GradveilError
from gradveil.core.types import Params
from gradveil.generators import Generator, build, resized
from gradveil.threat.observation import Observation

_OBJECTIVES: dict[str, Objective] = {"squared": Squared(), "cosine": Cosine(), "marks": OrthogonalObjective()}
SHIPPED: dict[tuple[int, ...], str] = {(3, 32, 32): "cifar10", (1, 28, 28): "mnist"}
"""The generator that ``auto`` takes for inputs of a shape."""


@dataclass(frozen=True, kw_only=True)
class Generative(Matching):
    """What attacks with a generator share: they begin with its code, and do to candidates what a defense did."""

    generator: str = "auto"
    aware: bool = True
    pruned: Pruned = "sent"
    draws: int = 0
    averaged: Averages = "distances"
    statistics: float = 0.0

    def codes(self, one: Observation, _: PhaseResult | None = None) -> Codes:
        """The code is unknown, of a generator that draws what the inputs look like."""
        device, shape = next(iter(one.sent.values())).device, "x".join(map(str, one.domain.shape))
        name = SHIPPED.get(one.domain.shape) if self.generator == "auto" else self.generator
        if name is None:
            raise GradveilError(
                f"no generator is shipped for inputs of {shape}: choose one with "
                "generator=, such as one trained with `gradveil generator train`"
            )
        generator = _loaded(name, device)
        (channels, *drawn_sides), (wanted, *sides) = generator.shape, one.domain.shape
        if channels == wanted and len({*sides}) == len({*drawn_sides}) == 1 and drawn_sides > sides:
            generator = resized(generator, sides[0])  # as GGL has BigGAN's 256 pixels at 224
        if generator.shape != one.domain.shape:
            drawn = "x".join(map(str, generator.shape))
            raise GradveilError(f"the generator draws {drawn}, but the inputs are {shape}: choose another generator=")
        return Codes(generator, device)


@cache
def _loaded(spec: str, device: torch.device) -> Generator:
    return build(spec).to(device)


@ATTACKS.register("ggl")
@dataclass(frozen=True, kw_only=True)
class GGL(Generative):
    """Generative Gradient Leakage (Li et al. 2022): the code of a generator, found by CMA-ES, TuRBO or Adam."""

    optimizer: Literal["cma", "turbo", "turbo-1", "adam"] = "cma"
    distance: Literal["squared", "cosine", "marks"] = "squared"
    code: CodeCost = "kl"
    code_weight: float = 1e-3
    limit: float | None = None
    condition: Condition = "label"
    lr: float = 0.1
    schedule: Schedule = "steps"
    signed: bool = False
    population: int = 50

    def __post_init__(self) -> None:
        if self.match == "surrogate" and self.optimizer != "adam":
            raise GradveilError(
                f"attack ggl: {self.optimizer} searches codes alone, and match=surrogate a point too: use adam"
            )
        if self.limit is not None and self.optimizer in ("turbo", "turbo-1"):
            raise GradveilError(
                f"attack ggl: {self.optimizer} searches codes in [-2, 2] anyway: leave limit out, or use cma or adam"
            )
        super().__post_init__()

    @property
    def title(self) -> str:
        return f"GGL with {self.optimizer}"

    @property
    def objective(self) -> Objective:
        return _OBJECTIVES[self.distance]

    @property
    def steps(self) -> int:
        usual = {"adam": self.budget.iterations, "turbo-1": 10 * (self.budget.iterations // 4)}
        return self.iterations or usual.get(self.optimizer, max(1, self.budget.iterations // 4))

    @property
    def phases(self) -> tuple[Phase, ...]:
        search: Search
        if self.optimizer == "cma":
            search = Evolution(iterations=self.steps, population=self.population)
        elif self.optimizer == "turbo":
            search = TuRBO(iterations=self.steps)
        elif self.optimizer == "turbo-1":
            search = TuRBO.published(evaluations=self.steps)
        else:
            warmup = self.steps // 20 if self.schedule == "plateau" else 0
            search = Adam(iterations=self.steps, lr=self.lr, schedule=self.schedule, warmup=warmup, signed=self.signed)
        return (Phase(search=search, prior=self.codes),)

    def codes(self, one: Observation, _: PhaseResult | None = None) -> Codes:
        plain = super().codes(one)
        return Codes(
            plain.generator,
            plain.device,
            cost=self.code,
            weight=self.code_weight,
            limit=self.limit,
            condition=self.condition,
        )


@ATTACKS.register("gias")
@dataclass(frozen=True, kw_only=True)
class GIAS(Generative):
    """Gradient Inversion with Alternative Spaces (Jeon et al. 2021): a code first, then a generator of one's own.

    An eighth of the iterations goes to the code, the rest to the weights.
    """

    code_lr: float = 3e-2
    weight_lr: float = 1e-3
    tv: float = 1e-6
    title = "GIAS"
    objective = Cosine()

    @property
    def phases(self) -> tuple[Phase, ...]:
        code = Adam(iterations=max(1, self.steps // 8), lr=self.code_lr)
        weights = Adam(iterations=max(1, self.steps - self.steps // 8), lr=self.weight_lr)
        smooth = ((self.tv, roughness),)
        return (
            Phase(search=code, prior=self.codes, regularisers=smooth),
            Phase(search=weights, prior=_own_weights, regularisers=smooth),
        )


def _own_weights(_: Observation, before: PhaseResult | None) -> Prior:
    assert before is not None
    assert isinstance(before.prior, Codes)
    return OwnWeights(before.prior.generator, before.prior.code(before.unknowns))


@ATTACKS.register("gifd")
@dataclass(frozen=True, kw_only=True)
class GIFD(Generative):
    """Gradient Inversion over Feature Domains (Fang et al. 2023): the code, then features stage by stage in an l1 ball.

    ``radius`` is per entry of the features: a stage of d entries gets a ball of radius * d. The iterations are shared
    equally by the code and the ``stages`` after it.
    """

    lr: float = 0.1
    radius: float = 0.1
    tv: float = 1e-4
    norm: float = 1e-6
    stages: int = 3
    title = "GIFD"
    objective = Cosine()

    def __post_init__(self) -> None:
        if self.stages < 0:
            raise GradveilError(f"attack gifd: stages is at least 0, not {self.stages}")
        super().__post_init__()

    @property
    def phases(self) -> tuple[Phase, ...]:
        each = max(1, self.steps // (self.stages + 1))
        search = Adam(iterations=each, lr=self.lr, schedule="cosine", warmup=max(1, each // 20))
        smooth = ((self.tv, roughness), (self.norm, energy))
        code = Phase(search=search, prior=self.codes, regularisers=smooth)
        return (code, *[Phase(search=search, prior=self.features, regularisers=smooth)] * self.stages)

    def codes(self, one: Observation, _: PhaseResult | None = None) -> Codes:
        codes = super().codes(one)
        most = len(codes.generator.stages) - 1
        if self.stages > most:
            raise GradveilError(
                f"attack gifd: stages={self.stages}, but the generator has {most} after its code: use fewer"
            )
        return codes

    def features(self, _: Observation, before: PhaseResult | None) -> Prior:
        """The features that enter the next stage, from what the phase before found."""
        assert before is not None
        prior = before.prior
        assert isinstance(prior, Codes | Features)
        stages = prior.generator.stages
        stage = stages[1] if isinstance(prior, Codes) else stages[stages.index(prior.stage) + 1]

        def entering(unknowns: Params, labels: Tensor) -> Tensor:
            if isinstance(prior, Codes):
                return prior.generator.until(prior.code(unknowns), stage, labels)
            return prior.generator.between(unknowns["features"], prior.stage, stage, labels)

        with torch.no_grad():
            center = vmap(entering)(before.unknowns, before.labels)
        return Features(prior.generator, stage, center, self.radius * center[0, 0].numel())
