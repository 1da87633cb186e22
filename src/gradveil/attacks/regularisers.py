"""What a plausible picture looks like, apart from the update. For one problem: [B, C, H, W] in, a scalar out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Regulariser = Callable[[Tensor], Tensor]


def energy(inputs: Tensor) -> Tensor:
    """The squared length of the picture around mid-gray (GradInversion's image norm)."""
    return (inputs - 0.5).square().sum()


def total_variation(inputs: Tensor) -> Tensor:
    """Mean absolute difference of neighbors, across plus down."""
    across = (inputs[..., :, 1:] - inputs[..., :, :-1]).abs().mean()
    down = (inputs[..., 1:, :] - inputs[..., :-1, :]).abs().mean()
    return across + down
