"""Restarts that are pulled together."""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.attacks.parts.matching import shifted_onto, with_group_consistency
from gradveil.core.types import Params

UPDATES, RESTARTS = 3, 4


def brightness(point: Params) -> tuple[Params, Tensor]:
    """An objective that is as easy to differentiate as can be."""
    return {"pixels": torch.ones_like(point["pixels"])}, point["pixels"].flatten(1).sum(dim=1)


def test_the_cost_is_the_mean_squared_distance_to_the_mean_of_an_updates_restarts() -> None:
    pixels = torch.rand((UPDATES * RESTARTS, 2, 3, 8, 8), generator=torch.Generator().manual_seed(0)).requires_grad_()
    means = pixels.detach().view(UPDATES, RESTARTS, 2, 3, 8, 8).mean(dim=1).repeat_interleave(RESTARTS, dim=0)
    cost = 0.5 * (pixels - means).square().flatten(1).mean(dim=1)
    (pull,) = torch.autograd.grad(cost.sum(), pixels)
    point = {"pixels": pixels.detach()}
    slopes, values = with_group_consistency(brightness, RESTARTS, 0.5)(point)
    torch.testing.assert_close(values, brightness(point)[1] + cost.detach())
    torch.testing.assert_close(slopes["pixels"], 1 + pull)


def test_one_restart_or_no_weight_has_nothing_to_pull() -> None:
    assert with_group_consistency(brightness, 1, 0.5) is brightness
    assert with_group_consistency(brightness, RESTARTS, 0.0) is brightness


def test_what_was_shifted_by_a_few_pixels_is_shifted_back() -> None:
    target = torch.rand((UPDATES, 1, 2, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    moves = [(0, 0), (1, -2), (-2, 1), (2, 2)]
    moved = torch.cat([target.roll(move, dims=(-2, -1)) for move in moves], dim=1)
    torch.testing.assert_close(shifted_onto(moved, target), target.expand_as(moved))
    far = target.roll(5, dims=-1)
    assert not torch.allclose(shifted_onto(far, target), target), "an eighth of the side at most"


def test_registered_restarts_are_pulled_to_the_mean_of_shifted_ones() -> None:
    image = torch.rand((1, 1, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    point = {"pixels": torch.cat([image, image, image.roll(1, dims=-1)])}
    plain, pulled = (with_group_consistency(brightness, 3, 0.5, registered=r)(point)[1] for r in (False, True))
    assert pulled[0] < plain[0]
