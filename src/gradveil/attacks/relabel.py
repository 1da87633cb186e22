"""Labels of a client that took several local steps, found by trying them out.

After a few steps the predictions have moved, so the counts read off the sum of the steps are only a first guess. The
adversary knows the recipe: it repeats the local run on random inputs with other labels, one changed or two swapped at a
time, and keeps what brings the last layer's bias nearer to the one it saw. That also settles the order of the labels as
far as mini-batches make it matter. On a large model only the classifier takes these steps: a few of them hardly move
what comes before it, and hundreds of local runs of the whole would take longer than the attack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.client.local import local_update
from gradveil.core.types import Recipe
from gradveil.models import Functional, representation
from gradveil.threat.observation import Observation

_MOST = 8
_LARGE = 1_000_000
"""Parameters from which on only the classifier is trained."""


def try_out(one: Observation, labels: Tensor, inputs: Tensor, key: str) -> Tensor:
    """The labels [n] that explain the update of parameter ``key`` best, starting from a guess.

    ``inputs`` [n, C, H, W] stand in for the private ones. A guess for more than eight examples is left as it is: there
    the counts are what matters, and trying out would take longer than the attack.
    """
    recipe = one.recipe
    if recipe is None or len(labels) > _MOST:
        return labels
    run = _local_run(one, recipe, inputs, key)

    def distance(candidate: Tensor) -> Tensor:
        return (run(candidate) - one.reply[key]).square().sum()

    best, lowest = labels, distance(labels)
    for _ in range(3 * len(labels)):
        candidates = _neighbors(best, one.domain.classes)
        distances = vmap(distance, chunk_size=64)(candidates)
        if not bool(distances.min() < lowest):
            break
        best, lowest = candidates[distances.argmin()], distances.min()
    return best


def _local_run(one: Observation, recipe: Recipe, inputs: Tensor, key: str) -> Callable[[Tensor], Tensor]:
    """What the local run of these inputs, with some labels, makes of a parameter of the classifier."""
    name, _, parameter = key.rpartition(".")
    if sum(tensor.numel() for tensor in one.sent.values()) < _LARGE:
        model, start, wanted = Functional(one.module, train_mode=recipe.train_mode), one.sent, key
    else:
        model, wanted = Functional(one.module.get_submodule(name)), parameter
        start = {own: one.sent[f"{name}.{own}"] for own in model.params}
        with torch.no_grad():
            inputs = representation(one.module, one.domain)(inputs, one.sent)
    return lambda labels: local_update(model, one.loss, start, inputs, labels, recipe)[wanted]


def _neighbors(labels: Tensor, classes: int) -> Tensor:
    """[m, n]: every way to change one label or to swap two."""
    count = len(labels)
    changed = labels.repeat(count * classes, 1)
    place = torch.arange(count, device=labels.device).repeat_interleave(classes)
    changed[torch.arange(len(changed)), place] = torch.arange(classes, device=labels.device).repeat(count)
    first, second = torch.triu_indices(count, count, 1, device=labels.device)
    swapped = labels.repeat(len(first), 1)
    rows = torch.arange(len(first))
    swapped[rows, first], swapped[rows, second] = labels[second], labels[first]
    return torch.cat([changed, swapped])
