"""Which reconstruction belongs to which private image: an update does not say in what order the batch was."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch


def matched(guess: Batch, truth: Batch) -> Batch:
    """The guess in the order of the truth: a new batch; neither argument changes."""
    return guess.take(matching_order(guess, truth))


def matching_order(guess: Batch, truth: Batch) -> Tensor:
    """[n]: for each private image the position of its guess, with the least total squared error of pixels (Hungarian).

    Guesses that are not finite are left for the places nobody else wants.
    """
    if guess.inputs.shape != truth.inputs.shape:
        shapes = f"{list(guess.inputs.shape)} and {list(truth.inputs.shape)}"
        raise GradveilError(f"a guess can only be matched with as many images of the same size, not {shapes}")
    cost = _squared_distances(truth.inputs, guess.inputs)
    _, order = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(order).to(guess.inputs.device)


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """[n, C, H, W] and [m, C, H, W] to [n, m] on the CPU, in double precision, all finite."""
    exact = "donot_use_mm_for_euclid_dist"
    cost = torch.cdist(a.flatten(1).double(), b.flatten(1).double(), compute_mode=exact).square().cpu()
    finite = cost[cost.isfinite()]
    worst = float(finite.max()) + 1 if len(finite) else 1.0
    return cost.nan_to_num(nan=worst, posinf=worst)
