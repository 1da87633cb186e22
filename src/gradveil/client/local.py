"""The local run of a client as a pure, differentiable function.

The client computes its update with it, and an attack that matches updates differentiates through the same code, so the
two can never disagree about what a local run is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

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


@dataclass(frozen=True)
class Wanted:
    """A gradient that a local run asks for: of this model's loss, at these parameters, on these examples."""

    model: Functional
    loss: Loss
    params: Params
    inputs: Tensor
    targets: Tensor

    def gradient(self) -> tuple[Params, Tensor]:
        """The gradient and the loss."""
        found: tuple[Params, Tensor] = grad_and_value(
            lambda p: self.model.loss(self.loss, p, self.inputs, self.targets)
        )(self.params)
        return found


T = TypeVar("T")
Run = Generator[Wanted, tuple[Params, Tensor], T]
"""Work that asks for gradients one at a time and ends with a result: several can be stepped side by side."""


def finished(run: Run[T]) -> T:
    """What a run ends with, each gradient computed when it asks for it."""
    try:
        wanted = next(run)
        while True:
            wanted = run.send(wanted.gradient())
    except StopIteration as end:
        result: T = end.value
        return result


class LocalRun:
    """A local run: it says which gradient it wants next, and steps when it gets it.

    Both ways to run it are the same loop. A generator can be stepped beside others, and breaks ``torch.compile``.
    """

    def __init__(
        self,
        model: Functional,
        loss: Loss,
        params: Params,
        inputs: Tensor,
        targets: Tensor,
        recipe: Recipe,
        *,
        on_gradient: Filter | None = None,
        on_forward: Callable[[Functional, int], Functional] | None = None,
    ) -> None:
        self.model, self.loss, self.recipe = model, loss, recipe
        self.inputs, self.targets = inputs, targets
        self.on_gradient, self.on_forward = on_gradient, on_forward
        self.start, self.current = params, params
        self.step: Params = {}
        """What the optimiser took last; with momentum, that is the velocity."""
        self.number = 0

    def alone(self) -> Params:
        """What is sent at the end, each gradient computed at once."""
        for examples in mini_batches(len(self.inputs), self.recipe):
            wanted = self.wanted(examples)
            self.take(examples, wanted, wanted.gradient())
        return self.update()

    def asking(self) -> Run[Params]:
        """What is sent at the end, each gradient left to whoever runs it."""
        for examples in mini_batches(len(self.inputs), self.recipe):
            wanted = self.wanted(examples)
            self.take(examples, wanted, (yield wanted))
        return self.update()

    def wanted(self, examples: slice) -> Wanted:
        inputs = self.inputs[examples]
        model = self.model if self.on_forward is None else self.on_forward(self.model, len(inputs))
        return Wanted(model, self.loss, self.current, inputs, self.targets[examples])

    def take(self, examples: slice, wanted: Wanted, found: tuple[Params, Tensor]) -> None:
        """Step by the gradient that was wanted, in the way of the recipe."""
        (step, value), recipe, self.number = found, self.recipe, self.number + 1
        if self.on_gradient is not None:
            step = self.on_gradient(step, Taken(self.current, examples, self.number, wanted.model, value))
        if recipe.sends == "delta":
            if recipe.weight_decay:
                step = map_each(lambda g, p: g + recipe.weight_decay * p, step, self.current)
            if recipe.momentum and self.step:
                step = map_each(lambda v, g: recipe.momentum * v + g, self.step, step)
            self.current = subtract(self.current, scaled(step, recipe.lr))
        self.step = step

    def update(self) -> Params:
        """What is sent at the end."""
        return self.step if self.recipe.sends == "gradient" else subtract(self.current, self.start)


def local_update(
    model: Functional, loss: Loss, params: Params, inputs: Tensor, targets: Tensor, recipe: Recipe
) -> Params:
    """What a client without a defense sends for ``inputs`` [n, C, H, W] and ``targets``: labels [n] or probabilities.

    The gradient of the whole batch, or the difference of parameters after the whole local run. Examples are visited in
    their order in every epoch. Differentiable in parameters, inputs and targets, and safe under ``torch.func``.
    """
    return LocalRun(model, loss, params, inputs, targets, recipe).alone()


def mini_batches(count: int, recipe: Recipe) -> Iterator[slice]:
    """The examples of each local step, in order."""
    size = recipe.batch_size or count
    for _ in range(recipe.epochs):
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The usual loss; takes labels [n] or probabilities [n, classes]."""
    return torch.nn.functional.cross_entropy(outputs, targets)
