"""The group prior of GradInversion: the restarts of one update look for the same picture."""

from __future__ import annotations

from torch import Tensor

from gradveil.attacks.engine import Evaluate
from gradveil.core.types import Params


def pulled_together(evaluate: Evaluate, restarts: int, weight: float) -> Evaluate:
    """The same problems, ``restarts`` in a row of each update, with their mean squared distance to their mean added.

    A mean over pixels, not a sum: the matching is a share of the update's square, which a sum over pixels would drown.
    """
    if weight == 0 or restarts == 1:
        return evaluate

    def pulled(point: Params) -> tuple[Params, Tensor]:
        gradients, values = evaluate(point)
        each = point["pixels"].view(-1, restarts, *point["pixels"].shape[1:])
        away = (each - each.mean(dim=1, keepdim=True)).flatten(0, 1)
        cost = weight * away.square().flatten(1).mean(dim=1)
        pull = 2 * weight / away[0].numel() * away
        return {**gradients, "pixels": gradients["pixels"] + pull}, values + cost

    return pulled
