"""Attacks by the name of their paper, each a composition of the parts beside this file."""

from __future__ import annotations

from gradveil.attacks.base import ATTACKS, Attack, Budget
from gradveil.attacks.engine import Precision, Strategy
from gradveil.attacks.matching import Matching
from gradveil.attacks.objectives import cosine
from gradveil.attacks.regularisers import total_variation
from gradveil.attacks.search import Adam


@ATTACKS.register("ig")
def ig(
    budget: Budget,
    *,
    iterations: int | None = None,
    restarts: int | None = None,
    lr: float = 0.1,
    tv: float = 1e-3,
    signed: bool = True,
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """Inverting Gradients (Geiping et al. 2020): cosine matching, signed Adam, total variation.

    The weight of total variation is for pixels in [0, 1]: about four times that of normalised ones.
    """
    return Matching(
        title="IG",
        objective=cosine,
        search=Adam(iterations=iterations or budget.iterations, lr=lr, signed=signed),
        restarts=restarts or budget.restarts,
        regularisers=((tv, total_variation),),
        strategy=strategy,
        precision=precision,
    )
