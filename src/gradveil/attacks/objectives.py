"""How far a candidate's update is from the observed one. Written for one problem: named tensors in, a scalar out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradveil.core.trees import dot, subtract
from gradveil.core.types import Params

Objective = Callable[[Params, Params], Tensor]

_TINY = 1e-20


def cosine(update: Params, observed: Params) -> Tensor:
    """One minus the cosine of the angle between the two updates, all tensors as one vector (Geiping et al. 2020)."""
    lengths = (dot(update, update) * dot(observed, observed) + _TINY).sqrt()
    return 1 - dot(update, observed) / lengths


def squared(update: Params, observed: Params) -> Tensor:
    """The sum of squared differences over all tensors (Zhu et al. 2019)."""
    difference = subtract(update, observed)
    return dot(difference, difference)
