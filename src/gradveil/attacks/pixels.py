"""Attacks that search pixels, by the name of their paper, each a composition of parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gradveil.attacks.base import ATTACKS
from gradveil.attacks.parts.counter import Averages
from gradveil.attacks.parts.lbfgs import LBFGS
from gradveil.attacks.parts.matching import Matching, Phase, over_pixels
from gradveil.attacks.parts.objectives import Cosine, Objective, Squared, energy, roughness
from gradveil.attacks.parts.problem import StatisticsRule
from gradveil.attacks.parts.search import Adam
from gradveil.attacks.parts.updates import Explanation


@ATTACKS.register("idlg")
@dataclass(frozen=True, kw_only=True)
class IDLG(Matching):
    """Improved DLG (Zhao et al. 2020): the label read off the last layer, then DLG on the pixels alone.

    ``distance=cosine`` is csDLG as OUTPOST (Wang et al. 2024) runs it, there with granted labels: threat C+labels.
    """

    history: int = 100
    distance: Literal["squared", "cosine"] = "squared"
    title = "iDLG"

    @property
    def objective(self) -> Objective:
        return Cosine() if self.distance == "cosine" else Squared()

    @property
    def steps(self) -> int:
        """L-BFGS takes small problems further than Adam if it is given half as many iterations more."""
        return self.iterations or self.budget.iterations * 3 // 2

    @property
    def phases(self) -> tuple[Phase, ...]:
        search = LBFGS(iterations=self.steps, history=self.history, restarts=self.problems_each)
        return (Phase(search=search, prior=over_pixels(free=True)),)


@ATTACKS.register("dlg")
class DLG(IDLG):
    """Deep Leakage from Gradients (Zhu et al. 2019): squared matching by L-BFGS, pixels and labels together."""

    title = "DLG"
    searches_labels = True


@ATTACKS.register("ig")
@dataclass(frozen=True, kw_only=True)
class InvertingGradients(Matching):
    """Inverting Gradients (Geiping et al. 2020), also GS: cosine matching, signed Adam, total variation.

    The weight of total variation is for pixels in [0, 1], where 4e-4 is the paper's 1e-4 for normalised ones. Short
    searches want more of it, long ones and residual networks less.
    """

    lr: float = 0.1
    tv: float = 1e-3
    signed: bool = True
    aware: bool = False
    draws: int = 0
    averaged: Averages = "distances"
    title = "IG"
    objective = Cosine()

    @property
    def phases(self) -> tuple[Phase, ...]:
        search = Adam(iterations=self.steps, lr=self.lr, signed=self.signed)
        return (Phase(search=search, prior=over_pixels(), regularisers=((self.tv, roughness),)),)


@ATTACKS.register("gi")
@dataclass(frozen=True, kw_only=True)
class GradInversion(Matching):
    """GradInversion (Yin et al. 2021): squared matching, image priors, restarts pulled together, batch-norm statistics.

    The statistics count only where the threat model gives them (E). Restarts are registered before their mean is taken,
    and each step adds Langevin noise. CENSOR's paper has it match cosines.
    """

    lr: float = 0.1
    warmup: int = 50
    tv: float = 4e-4
    norm: float = 1e-6
    consensus: float = 0.01
    registered: bool = True
    langevin: float = 0.2
    statistics: float = 0.1
    statistics_rule: StatisticsRule = "squared"
    distance: Literal["squared", "cosine"] = "squared"
    title = "GI"

    @property
    def objective(self) -> Objective:
        return Squared() if self.distance == "squared" else Cosine()

    @property
    def phases(self) -> tuple[Phase, ...]:
        warmup = min(self.warmup, self.steps // 4)
        search = Adam(iterations=self.steps, lr=self.lr, schedule="cosine", warmup=warmup, noise=self.langevin)
        natural = ((self.tv, roughness), (self.norm, energy))
        return (Phase(search=search, prior=over_pixels(), regularisers=natural),)


@ATTACKS.register("sme")
@dataclass(frozen=True, kw_only=True)
class SME(Matching):
    """Surrogate model extension (Zhu et al. 2023) for FedAvg: one gradient at a searched point along the update."""

    lr: float = 0.1
    tv: float = 1e-3
    mix_lr: float = 1e-3
    match: ClassVar[Explanation] = "surrogate"  # type: ignore[misc]
    title = "SME"
    objective = Cosine()

    @property
    def phases(self) -> tuple[Phase, ...]:
        search = Adam(iterations=self.steps, lr=self.lr, signed=True, rates={"mix": self.mix_lr})
        return (Phase(search=search, prior=over_pixels(), regularisers=((self.tv, roughness),)),)
