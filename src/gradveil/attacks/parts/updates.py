"""What an update of several local steps is taken for: all steps simulated, or one gradient."""

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


def gradient_scale(one: Observation) -> float:
    """How many mean gradients a reply adds up to: learning rates times steps where it is a difference of parameters."""
    if one.kind == "gradient" or one.recipe is None:
        return 1.0
    return one.recipe.lr * sum(counts(one.recipe, local_steps(one) or 1))


def as_gradient(one: Observation) -> Observation:
    """What a client sent after one known local step, as the gradient of that step; anything else as it is."""
    recipe = one.recipe
    if one.kind == "gradient" or recipe is None or one.batch_size is None or recipe.weight_decay:
        return one
    if local_steps(one) != 1:
        return one
    earlier = tuple(map(as_gradient, one.earlier))
    return replace(_one_gradient(one, recipe.lr, recipe), earlier=earlier)


def explained(one: Observation, explanation: Explanation) -> Observation:
    """The observation as the attack will treat it. A gradient stays as it is.

    So does one step under ``surrogate``: it was taken at the broadcast, and nothing lies between.
    """
    if one.kind == "gradient" or (explanation == "surrogate" and local_steps(one) == 1):
        return one
    if explanation != "simulated":
        return _one_gradient(one, gradient_scale(one), one.recipe or Recipe())
    if one.recipe is None:
        raise GradveilError(
            "simulating a local run needs its recipe, which this threat lacks: use threat C, or match=averaged"
        )
    return one


def between(sent: Params, gradient: Params, reach: float, mix: Tensor) -> Params:
    """The parameters a share ``mix`` of the way from the first to the last: sent - mix * reach * gradient."""
    return {name: tensor - mix * reach * gradient[name] for name, tensor in sent.items()}


def _one_gradient(one: Observation, reach: float, recipe: Recipe) -> Observation:
    """A difference of parameters as one gradient, with which one step reaches as far."""
    recipe = Recipe(lr=reach, train_mode=recipe.train_mode)
    return replace(one, reply=scaled(one.reply, -1 / reach), kind="gradient", recipe=recipe)
