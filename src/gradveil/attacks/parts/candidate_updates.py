"""The update that each of many candidates would have caused by itself, a group of candidates at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.func import vmap

from gradveil.client.local import local_update
from gradveil.core.types import Params, Recipe
from gradveil.engine import shared_gradients, without_tf32
from gradveil.models import Functional
from gradveil.threat.observation import Observation

BYTES_AT_ONCE = {"cpu": 2**28, "cuda": 2**33}
"""Bytes that the updates of candidates may take together; one of them may take more."""
MOST = 250
"""Candidates in a group at most: activations take memory too."""

Updates = Callable[[Tensor, Tensor], Params]
"""(inputs [c, ...], labels [c]) -> the update of each candidate alone, [c, ...] by name."""


def group_size(sent: Params) -> int:
    """How many candidates' updates are held at a time."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
    room = BYTES_AT_ONCE["cuda" if next(iter(sent.values())).is_cuda else "cpu"]
    return max(1, min(MOST, room // size))


def groups(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def updates_for(one: Observation) -> Updates:
    """What a client without a defense would have sent for each of some candidates, from this broadcast on.

    One pass of a batch through the shared weights serves all candidates where the update is one gradient and the
    model's layers allow that; elsewhere every candidate runs the local steps on weights of its own.
    """
    recipe = one.recipe or Recipe(sends=one.kind)
    found = None
    if recipe.sends == "gradient":
        found = shared_gradients(
            one.module, one.sent, one.loss,
            train_mode=recipe.train_mode, shape=one.domain.shape, classes=one.domain.classes,
        )  # fmt: skip
    return found or _each_alone(one, recipe)


def _each_alone(one: Observation, recipe: Recipe) -> Updates:
    model = Functional(one.module, train_mode=recipe.train_mode)

    def alone(inputs: Tensor, label: Tensor) -> Params:
        return local_update(model, one.loss, one.sent, inputs.unsqueeze(0), label.unsqueeze(0), recipe)

    def updates(inputs: Tensor, labels: Tensor) -> Params:
        with without_tf32():
            return vmap(alone)(inputs, labels)

    return updates
