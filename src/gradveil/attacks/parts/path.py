"""The path of a local run: where a client's steps were taken, and what candidates would have added along it.

A difference of parameters is the sum of gradients that were taken one after the other, each where the ones before it
had led. Along the path it is linear in who took part, as one gradient is: each candidate's share is of its mean
gradient along the path. The path itself follows from who took part. So it begins as the straight line to where the run
ended, and is walked again with those who explain the difference best so far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.parts.candidate_updates import Updates, updates_for
from gradveil.attacks.parts.likelihood import TINY
from gradveil.attacks.parts.updates import counts
from gradveil.client.local import mini_batches
from gradveil.core.errors import GradveilError
from gradveil.core.trees import add, map_each, scaled, subtract
from gradveil.core.types import Batch, Params, Recipe
from gradveil.threat.observation import Observation

POINTS = 8
"""At so many points of a longer path, or of a part of it, gradients are taken."""
PARTS = 4
"""Into at most so many parts an epoch of more mini-batches falls."""


@dataclass(frozen=True)
class Path:
    """Where the steps of one client's run were taken, as far as the adversary knows."""

    one: Observation
    recipe: Recipe
    points: list[Params]
    """The parameters before each step."""

    def seen(self) -> Observation:
        """What was seen as the mean gradient along the path, which is what one step would have had to take."""
        often = counts(self.recipe, len(self.points))
        total = sum(often)
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.one.reply.items()}
        for count, point in zip(often, self.points, strict=True):
            mean = add(mean, point, count / total)
        taken = map_each(
            lambda moved, at: -moved / (self.recipe.lr * total) - self.recipe.weight_decay * at, self.one.reply, mean
        )
        return replace(self.one, reply=taken, kind="gradient", recipe=_one_step(self.recipe))

    def updates(self, part: int | None = None) -> Updates:
        """The mean gradient of each of some candidates along the path, or at the steps of one part of each epoch."""
        steps = [i for i in range(len(self.points)) if part in (None, self._part(i))]
        some = torch.linspace(0, len(steps) - 1, min(len(steps), POINTS)).round().int()
        places, often = [steps[i] for i in some.tolist()], counts(self.recipe, len(self.points))
        shares = [often[place] / sum(often[place] for place in places) for place in places]
        gradients = [_gradients_at(self.one, self.recipe, self.points[place]) for place in places]

        def updates(inputs: Tensor, labels: Tensor) -> Params:
            mean = scaled(gradients[0](inputs, labels), shares[0])
            for share, gradient in zip(shares[1:], gradients[1:], strict=True):
                mean = add(mean, gradient(inputs, labels), share)
            return mean

        return updates

    def walked(self, batch: Batch, shares: Tensor) -> Path:
        """The path of a client whose mini-batches hold these examples by their shares in each part, [parts, n].

        What that leaves of the difference, such as noise of a defense, is taken for the same at every step.
        """
        weights = shares.clamp(min=0) / (shares.clamp(min=0).sum(dim=1, keepdim=True) + TINY)
        now, velocity, points = self.one.sent, None, []
        for i in range(len(self.points)):
            points.append(now)
            each, own = _gradients_at(self.one, self.recipe, now)(batch.inputs, batch.labels), weights[self._part(i)]
            step = {
                name: torch.tensordot(own.to(tensor), tensor, 1) + self.recipe.weight_decay * now[name]
                for name, tensor in each.items()
            }
            velocity = step if velocity is None else add(step, velocity, self.recipe.momentum)
            now = add(now, velocity, -self.recipe.lr)
        left = subtract(self.one.reply, subtract(now, self.one.sent))
        return replace(self, points=[add(point, left, i / len(points)) for i, point in enumerate(points)])

    @property
    def parts(self) -> int:
        """In how many parts of an epoch it is told apart who was in which mini-batch."""
        return min(len(self.points) // self.recipe.epochs, PARTS)

    def _part(self, step: int) -> int:
        each = len(self.points) // self.recipe.epochs
        return step % each * self.parts // each


def straight(one: Observation) -> Path:
    """The line from where a run began to where it ended, in equal steps."""
    if one.recipe is None:
        raise GradveilError("the path of a local run needs its recipe, which this threat lacks")
    steps = len(list(mini_batches(one.batch_size or 1, one.recipe)))
    return Path(one, one.recipe, [add(one.sent, one.reply, i / steps) for i in range(steps)])


def _gradients_at(one: Observation, recipe: Recipe, point: Params) -> Updates:
    return updates_for(replace(one, sent=point, kind="gradient", recipe=_one_step(recipe)))


def _one_step(recipe: Recipe) -> Recipe:
    return Recipe(train_mode=recipe.train_mode)
