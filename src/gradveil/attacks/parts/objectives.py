"""What a candidate is judged by: how far its update is from the observed one, and how natural its inputs look.

An objective is written for one problem: named tensors in, a scalar out. Beside that stands its value and derivative for
many problems at once, in as few passes over memory as it takes: the updates of a hundred problems are gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from gradveil.core.trees import dot, exact_norms, map_each, subtract
from gradveil.core.types import Params
from gradveil.domains import Domain

_TINY = 1e-20

Regulariser = Callable[[Domain, Tensor], Tensor]
"""A domain and inputs [B, ...] of it to a scalar: smaller is more natural."""


class Objective(Protocol):
    """A distance between updates."""

    def __call__(self, update: Params, observed: Params) -> Tensor:
        """The distance for one problem, a scalar."""

    def slopes(self, updates: Params, observed: Params) -> tuple[Params, Tensor]:
        """For updates [N, ...]: the derivative of the distance in the update, [N, ...], and the distances [N]."""


@runtime_checkable
class OfMoments(Protocol):
    """A distance that is a function of two numbers."""

    def of_moments(self, product: Tensor, square: Tensor, observed: Tensor) -> Tensor:
        """The distances [N] from the products of updates and observed ones, and the squared lengths of both."""


class Cosine:
    """One minus the cosine of the angle between the two updates, all tensors as one vector (Geiping et al. 2020)."""

    def __call__(self, update: Params, observed: Params) -> Tensor:
        both = (dot(update, update) * dot(observed, observed) + _TINY).sqrt()
        return 1 - dot(update, observed) / both

    def slopes(self, updates: Params, observed: Params) -> tuple[Params, Tensor]:
        squares = _squares(updates)
        products = [torch.linalg.vecdot(g.flatten(1), observed[name].flatten(1)) for name, g in updates.items()]
        product = torch.stack(products).sum(dim=0)
        both = (squares * _squares(observed) + _TINY).sqrt()
        toward, along = -1 / both, product / (both * (squares + _TINY))
        slope = map_each(
            lambda g, t: torch.addcmul(per_problem(along, g) * g, per_problem(toward, t), t), updates, observed
        )
        return slope, 1 - product / both

    def of_moments(self, product: Tensor, square: Tensor, observed: Tensor) -> Tensor:
        return 1 - product / (square * observed + _TINY).sqrt()


class Squared:
    """The sum of squared differences over all tensors (Zhu et al. 2019), as a share of the observed update's square.

    The share makes thresholds and step sizes mean the same for large and for small updates.
    """

    def __call__(self, update: Params, observed: Params) -> Tensor:
        difference = subtract(update, observed)
        return dot(difference, difference) / (dot(observed, observed) + _TINY)

    def slopes(self, updates: Params, observed: Params) -> tuple[Params, Tensor]:
        difference, whole = subtract(updates, observed), _squares(observed) + _TINY
        return map_each(lambda x: per_problem(2 / whole, x) * x, difference), _squares(difference) / whole

    def of_moments(self, product: Tensor, square: Tensor, observed: Tensor) -> Tensor:
        return (square - 2 * product + observed) / (observed + _TINY)


class OrthogonalObjective:
    """What CENSOR leaves of the gradient in an update at right angles to it, mean over tensors.

    The squared difference of the logs of the two norms, and the squared part of the observed tensor along the
    candidate's, in units of what a random direction has there: near the private example both shrink with the square of
    the gradient's error.
    """

    def __call__(self, update: Params, observed: Params) -> Tensor:
        pairs = [(tensor.flatten(), observed[name].flatten()) for name, tensor in update.items()]
        own, seen = (torch.stack([pair[i].square().sum() for pair in pairs]) + _TINY for i in (0, 1))
        products = torch.stack([torch.dot(*pair) for pair in pairs])
        sizes = torch.tensor([pair[0].numel() for pair in pairs], device=own.device)
        return ((own / seen).log().square() / 4 + sizes * products.square() / (own * seen)).mean()

    def slopes(self, updates: Params, observed: Params) -> tuple[Params, Tensor]:
        found: tuple[Params, Tensor] = vmap(grad_and_value(self))(updates, observed)
        return found


def roughness(domain: Domain, inputs: Tensor) -> Tensor:
    return domain.roughness(inputs)


def energy(domain: Domain, inputs: Tensor) -> Tensor:
    return domain.energy(inputs)


def per_problem(values: Tensor, tensor: Tensor) -> Tensor:
    """[N] shaped to be broadcast over [N, ...]."""
    return values.view(-1, *[1] * (tensor.dim() - 1))


def _squares(a: Params) -> Tensor:
    """The squared length of each problem, [N], without a product in memory."""
    return torch.stack([exact_norms(x.flatten(1)) for x in a.values()]).square().sum(dim=0)
