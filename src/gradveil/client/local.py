"""The local run of a client as a pure, differentiable function.

The client computes its update with it, and an attack that matches updates differentiates through the same code, so the
two can never disagree about what a local run is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradveil.core.trees import map_each
from gradveil.core.types import Loss, Params, Recipe
from gradveil.engine import Gradient, Request
from gradveil.models.functional import Functional


class LocalRun:
    """A local run that leaves gradients to its caller, who can evaluate those of several clients together.

    ::

        while not run.done:
            run.take(run.request().evaluate())
        run.update()
    """

    def __init__(
        self, model: Functional, loss: Loss, params: Params, inputs: Tensor, targets: Tensor, recipe: Recipe
    ) -> None:
        self.model, self.loss, self.recipe = model, loss, recipe
        self.inputs, self.targets = inputs, targets
        self.sent, self.params = params, params
        self.number = 0
        """How many steps were taken."""
        self._batches = mini_batches(len(inputs), recipe)
        self._evaluated = model
        self._step: Params = {}
        """What the optimiser took last; with momentum, that is the velocity."""

    @property
    def trained(self) -> bool:
        """Whether all local steps were taken."""
        return self.number == len(self._batches)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to request."""
        return self.trained

    @property
    def examples(self) -> slice:
        """The examples of the next step."""
        return self._batches[self.number]

    def request(self) -> Request[Any]:
        """The gradient that the next step needs."""
        inputs, targets = self.inputs[self.examples], self.targets[self.examples]
        self._evaluated = model = self.on_forward(len(inputs))
        return Request(Gradient(model, self.loss), (self.params, model.buffers, inputs, targets))

    def take(self, result: Any) -> None:
        """Step by the gradient that was requested; the loss comes with it."""
        gradient, _ = result
        self.apply(gradient)

    def apply(self, step: Params) -> None:
        """Take one step along a gradient, in the way of the recipe."""
        recipe = self.recipe
        if recipe.sends == "delta":
            if recipe.weight_decay:
                step = map_each(lambda g, p: g + recipe.weight_decay * p, step, self.params)
            if recipe.momentum and self._step:
                step = map_each(lambda v, g: recipe.momentum * v + g, self._step, step)
            self.params = self.add(self.params, step, -recipe.lr)
        self._step = step
        self.number += 1

    def update(self) -> Params:
        """What is sent at the end."""
        return self._step if self.recipe.sends == "gradient" else self.add(self.params, self.sent, -1.0)

    def on_forward(self, examples: int) -> Functional:  # noqa: ARG002
        """The model as the next step evaluates it, on so many examples."""
        return self.model

    def add(self, a: Params, b: Params, scale: float) -> Params:
        """``a + scale * b`` with the rounding of :func:`gradveil.core.trees.added_at_once`, for transforms too."""
        return map_each(lambda x, y: torch.add(x, y, alpha=scale), a, b)


def local_update(
    model: Functional, loss: Loss, params: Params, inputs: Tensor, targets: Tensor, recipe: Recipe
) -> Params:
    """What a client without a defense sends for ``inputs`` [n, C, H, W] and ``targets``: labels [n] or probabilities.

    The gradient of the whole batch, or the difference of parameters after the whole local run. Examples are visited in
    their order in every epoch. Differentiable in parameters, inputs and targets, and safe under ``torch.func``.
    """
    run = LocalRun(model, loss, params, inputs, targets, recipe)
    while not run.done:
        run.take(run.request().evaluate())
    return run.update()


def mini_batches(count: int, recipe: Recipe) -> list[slice]:
    """The examples of each local step, in order."""
    size = recipe.batch_size or count
    return [slice(i, min(i + size, count)) for _ in range(recipe.epochs) for i in range(0, count, size)]
