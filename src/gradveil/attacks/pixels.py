"""Attacks by the name of their paper, each a composition of the parts beside this file."""

from __future__ import annotations

from dataclasses import replace

from gradveil.attacks.base import ATTACKS, Attack, Budget
from gradveil.attacks.engine import Precision, Strategy
from gradveil.attacks.parts.lbfgs import LBFGS
from gradveil.attacks.parts.matching import Matching, over_pixels
from gradveil.attacks.parts.objectives import Cosine, Squared
from gradveil.attacks.parts.search import Adam
from gradveil.attacks.parts.updates import Explanation
from gradveil.attacks.regularisers import energy, total_variation


@ATTACKS.register("dlg")
def dlg(
    budget: Budget,
    *,
    iterations: int | None = None,
    restarts: int | None = None,
    history: int = 100,
    match: Explanation = "simulated",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """Deep Leakage from Gradients (Zhu et al. 2019): squared matching by L-BFGS, pixels and labels together."""
    leak = _deep_leakage("DLG", iterations or _longer(budget), restarts or budget.restarts, history)
    return replace(leak, labels="searched", explanation=match, strategy=strategy, precision=precision)


@ATTACKS.register("idlg")
def idlg(
    budget: Budget,
    *,
    iterations: int | None = None,
    restarts: int | None = None,
    history: int = 100,
    match: Explanation = "simulated",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """Improved DLG (Zhao et al. 2020): the label read off the last layer, then DLG on the pixels alone."""
    leak = _deep_leakage("iDLG", iterations or _longer(budget), restarts or budget.restarts, history)
    return replace(leak, explanation=match, strategy=strategy, precision=precision)


@ATTACKS.register("ig")
def ig(
    budget: Budget,
    *,
    iterations: int | None = None,
    restarts: int | None = None,
    lr: float = 0.1,
    tv: float = 1e-3,
    signed: bool = True,
    aware: bool = False,
    draws: int = 0,
    match: Explanation = "simulated",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Matching:
    """Inverting Gradients (Geiping et al. 2020), also csDLG and GS: cosine matching, signed Adam, total variation.

    The weight of total variation is for pixels in [0, 1], where 4e-4 is the paper's 1e-4 for normalised ones. Short
    searches want more of it, long ones and residual networks less.
    """
    return Matching(
        title="IG",
        objective=Cosine(),
        search=Adam(iterations=iterations or budget.iterations, lr=lr, signed=signed),
        restarts=restarts or budget.restarts,
        regularisers=((tv, total_variation),),
        aware=aware,
        draws=draws,
        explanation=match,
        strategy=strategy,
        precision=precision,
    )


@ATTACKS.register("gi")
def gi(
    budget: Budget,
    *,
    iterations: int | None = None,
    restarts: int | None = None,
    lr: float = 0.1,
    warmup: int = 50,
    tv: float = 4e-4,
    norm: float = 1e-6,
    consensus: float = 0.01,
    statistics: float = 0.1,
    match: Explanation = "simulated",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """GradInversion (Yin et al. 2021): squared matching, image priors, restarts pulled together, batch-norm statistics.

    The statistics count only where the threat model gives them (E). The consensus is the plain mean of the restarts;
    the paper registers them first. Its Langevin noise is left out.
    """
    rounds = iterations or budget.iterations
    return Matching(
        title="GI",
        objective=Squared(),
        search=Adam(iterations=rounds, lr=lr, schedule="cosine", warmup=min(warmup, rounds // 4)),
        restarts=restarts or budget.restarts,
        regularisers=((tv, total_variation), (norm, energy)),
        consensus=consensus,
        statistics=statistics,
        explanation=match,
        strategy=strategy,
        precision=precision,
    )


@ATTACKS.register("sme")
def sme(
    budget: Budget,
    *,
    iterations: int | None = None,
    restarts: int | None = None,
    lr: float = 0.1,
    tv: float = 1e-3,
    mix_lr: float = 1e-3,
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """Surrogate model extension (Zhu et al. 2023) for FedAvg: one gradient at a searched point along the update."""
    return Matching(
        title="SME",
        objective=Cosine(),
        search=Adam(iterations=iterations or budget.iterations, lr=lr, signed=True, rates={"mix": mix_lr}),
        restarts=restarts or budget.restarts,
        regularisers=((tv, total_variation),),
        explanation="surrogate",
        strategy=strategy,
        precision=precision,
    )


def _deep_leakage(title: str, iterations: int, restarts: int, history: int) -> Matching:
    """What DLG and iDLG share: squared matching of free pixels by L-BFGS."""
    search = LBFGS(iterations=iterations, history=history, restarts=restarts)
    return Matching(title=title, objective=Squared(), search=search, restarts=restarts, prior=over_pixels(free=True))


def _longer(budget: Budget) -> int:
    """L-BFGS takes small problems further than Adam if it is given half as many iterations more."""
    return budget.iterations * 3 // 2
