"""The local run of a client as a pure, differentiable function.

The client computes its update with it, and an attack that matches updates differentiates through the same code, so the
two can never disagree about what a local run is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value

from gradveil.core.trees import map_each, scaled, subtract
from gradveil.core.types import Loss, Params, Recipe
from gradveil.models.functional import Functional


@dataclass(frozen=True)
class Taken:
    """One local step: where it was taken, on which examples, the how manieth from 1, by what model, at what loss."""

    params: Params
    examples: slice
    number: int
    model: Functional
    value: Tensor


Filter = Callable[[Params, Taken], Params]
"""(gradient, step) -> the gradient the optimiser takes instead."""


def local_update(
    model: Functional,
    loss: Loss,
    params: Params,
    inputs: Tensor,
    targets: Tensor,
    recipe: Recipe,
    *,
    on_gradient: Filter | None = None,
    on_forward: Callable[[Functional, int], Functional] | None = None,
) -> Params:
    """What a client sends for ``inputs`` [n, C, H, W] and ``targets`` ([n] labels or [n, classes] probabilities).

    The gradient of the whole batch, or the difference of parameters after the whole local run. Examples are visited in
    their order in every epoch. Differentiable in parameters, inputs and targets, and safe under ``torch.func``.
    """

    def gradient(used: Functional, at: Params, examples: slice) -> tuple[Params, Tensor]:
        found: tuple[Params, Tensor] = grad_and_value(
            lambda p: used.loss(loss, p, inputs[examples], targets[examples])
        )(at)
        return found

    current, velocity = params, None
    for number, examples in enumerate(mini_batches(len(inputs), recipe), start=1):
        used = model if on_forward is None else on_forward(model, len(inputs[examples]))
        step, value = gradient(used, current, examples)
        if on_gradient is not None:
            step = on_gradient(step, Taken(current, examples, number, used, value))
        if recipe.sends == "gradient":
            return step
        if recipe.weight_decay:
            step = map_each(lambda g, p: g + recipe.weight_decay * p, step, current)
        if recipe.momentum:
            step = step if velocity is None else map_each(lambda v, g: recipe.momentum * v + g, velocity, step)
            velocity = step
        current = subtract(current, scaled(step, recipe.lr))
    return subtract(current, params)


def mini_batches(count: int, recipe: Recipe) -> Iterator[slice]:
    """The examples of each local step, in order."""
    size = recipe.batch_size or count
    for _ in range(recipe.epochs):
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The usual loss; takes labels [n] or probabilities [n, classes]."""
    return torch.nn.functional.cross_entropy(outputs, targets)
