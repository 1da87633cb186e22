"""How an update of several local steps is explained: simulate them all, or pretend that it was one gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Literal

from torch import Tensor

from gradveil.client.local import mini_batches
from gradveil.core.errors import GradveilError
from gradveil.core.trees import scaled
from gradveil.core.types import Params, Recipe
from gradveil.threat.observation import Observation

Explanation = Literal["simulated", "averaged", "surrogate"]
"""``simulated``: repeat the client's local run on the candidate, which needs its recipe. ``averaged``: take
-delta / (rate x steps), momentum counted in, for one gradient at the broadcast, the weak way. ``surrogate``: one
gradient at a point between the first and the last parameters, which is searched along (SME, Zhu et al. 2023)."""


def counts(recipe: Recipe, steps: int) -> list[float]:
    """How often the gradient of each step counts in the difference: with momentum, later steps take it again."""
    return list(accumulate(recipe.momentum**again for again in range(steps)))[::-1]


def local_steps(one: Observation) -> int | None:
    """How many local steps the client took; None where that is not known."""
    if one.kind == "gradient":
        return 1
    return None if one.recipe is None else len(list(mini_batches(one.batch_size or 1, one.recipe)))


def as_gradient(one: Observation) -> Observation:
    """What a client sent after one known local step, as the gradient of that step; anything else as it is."""
    recipe, size = one.recipe, one.batch_size
    if one.kind == "gradient" or recipe is None or size is None or recipe.weight_decay:
        return one
    if len(list(mini_batches(size, recipe))) > 1:
        return one
    return replace(
        one,
        reply=scaled(one.reply, -1 / recipe.lr),
        kind="gradient",
        recipe=Recipe(lr=recipe.lr, train_mode=recipe.train_mode),
        earlier=tuple(map(as_gradient, one.earlier)),
    )


def explained(one: Observation, explanation: Explanation) -> Observation:
    """The observation as the attack will treat it: a gradient stays as it is."""
    if one.kind == "gradient":
        return one
    if explanation == "simulated":
        if one.recipe is None:
            raise GradveilError(
                "simulating a local run needs its recipe, which this threat lacks: use threat C, or match=averaged"
            )
        return one
    recipe = one.recipe or Recipe(sends="delta", lr=1.0)
    length = recipe.lr * sum(counts(recipe, local_steps(one) or 1))
    return replace(
        one,
        reply=scaled(one.reply, -1 / length),
        kind="gradient",
        recipe=Recipe(lr=length, train_mode=recipe.train_mode),
    )


def between(sent: Params, gradient: Params, length: float, mix: Tensor) -> Params:
    """The parameters a share ``mix`` of the way from the first to the last: sent - mix * length * gradient."""
    return {name: tensor - mix * length * gradient[name] for name, tensor in sent.items()}
