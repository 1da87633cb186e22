"""The local run of a client as a pure, differentiable function.

The client computes its update with it, and an attack that matches updates differentiates through the same code, so the
two can never disagree about what a local run is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from gradveil.core.trees import added_at_once, map_each
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


T = TypeVar("T")
Found = tuple[Params, Tensor]
"""A gradient and the loss."""


@dataclass(frozen=True)
class Wanted(Generic[T]):
    """Work that a run asks for: a pure function of tensors, and a tree of them. Equal functions are the same work."""

    function: Callable[[Any], T]
    given: Any

    def alone(self) -> T:
        return self.function(self.given)


class Gradient:
    """(parameters, buffers, inputs, targets) -> the gradient of the loss in the parameters, and the loss."""

    def __init__(self, model: Functional, loss: Loss) -> None:
        self.model, self.loss = model, loss

    def __call__(self, given: tuple[Params, Params, Tensor, Tensor]) -> Found:
        params, buffers, inputs, targets = given
        model = self.model if buffers is self.model.buffers else self.model.with_buffers(buffers)
        found: Found = grad_and_value(lambda p: model.loss(self.loss, p, inputs, targets))(params)
        return found

    def __eq__(self, other: object) -> bool:
        """Of the same module and loss: all tensors come with the call."""
        return isinstance(other, Gradient) and (self.model.module, self.loss) == (other.model.module, other.loss)

    def __hash__(self) -> int:
        return hash((self.model.module, self.loss))


Run = Generator[Wanted[Any], Any, T]
"""Work that asks for other work, such as gradients, and ends with a result: several can be stepped side by side."""


def finished(run: Run[T]) -> T:
    """What a run ends with, all that it asks for computed when it asks for it."""
    try:
        wanted = next(run)
        while True:
            wanted = run.send(wanted.alone())
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
        self.add: Callable[[Params, Params, float], Params] = added
        self.step: Params = {}
        """What the optimiser took last; with momentum, that is the velocity."""
        self.number = 0

    def alone(self) -> Params:
        """What is sent at the end, each gradient computed at once."""
        for examples in mini_batches(len(self.inputs), self.recipe):
            model = self.evaluated(examples)
            self.take(examples, model, self.wanted(model, examples).alone())
        return self.update()

    def asking(self) -> Run[Params]:
        """What is sent at the end, each gradient left to whoever runs it."""
        self.add = added_at_once
        for examples in mini_batches(len(self.inputs), self.recipe):
            model = self.evaluated(examples)
            self.take(examples, model, (yield self.wanted(model, examples)))
        return self.update()

    def evaluated(self, examples: slice) -> Functional:
        """The model as this step evaluates it."""
        return self.model if self.on_forward is None else self.on_forward(self.model, len(self.inputs[examples]))

    def wanted(self, model: Functional, examples: slice) -> Wanted[Found]:
        given = (self.current, model.buffers, self.inputs[examples], self.targets[examples])
        return Wanted(Gradient(model, self.loss), given)

    def take(self, examples: slice, model: Functional, found: Found) -> None:
        """Step by the gradient that was wanted, in the way of the recipe."""
        (step, value), recipe, self.number = found, self.recipe, self.number + 1
        if self.on_gradient is not None:
            step = self.on_gradient(step, Taken(self.current, examples, self.number, model, value))
        if recipe.sends == "delta":
            if recipe.weight_decay:
                step = map_each(lambda g, p: g + recipe.weight_decay * p, step, self.current)
            if recipe.momentum and self.step:
                step = map_each(lambda v, g: recipe.momentum * v + g, self.step, step)
            self.current = self.add(self.current, step, -recipe.lr)
        self.step = step

    def update(self) -> Params:
        """What is sent at the end."""
        return self.step if self.recipe.sends == "gradient" else self.add(self.current, self.start, -1.0)


def local_update(
    model: Functional, loss: Loss, params: Params, inputs: Tensor, targets: Tensor, recipe: Recipe
) -> Params:
    """What a client without a defense sends for ``inputs`` [n, C, H, W] and ``targets``: labels [n] or probabilities.

    The gradient of the whole batch, or the difference of parameters after the whole local run. Examples are visited in
    their order in every epoch. Differentiable in parameters, inputs and targets, and safe under ``torch.func``.
    """
    return LocalRun(model, loss, params, inputs, targets, recipe).alone()


def added(a: Params, b: Params, scale: float) -> Params:
    """``a + scale * b`` with the rounding of :func:`added_at_once`, for transforms too."""
    return map_each(lambda x, y: torch.add(x, y, alpha=scale), a, b)


def mini_batches(count: int, recipe: Recipe) -> Iterator[slice]:
    """The examples of each local step, in order."""
    size = recipe.batch_size or count
    for _ in range(recipe.epochs):
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The usual loss; takes labels [n] or probabilities [n, classes]."""
    return torch.nn.functional.cross_entropy(outputs, targets)
