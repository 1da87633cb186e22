"""Labels of a client that took several local steps, found by trying them out.

After a few steps the predictions have moved, so the counts read off the sum of the steps are only a first guess. The
adversary knows the recipe: it repeats the local run on random inputs with other labels, one changed or two swapped at a
time, and keeps what brings the last layer's bias nearer to the one it saw. That also settles the order of the labels as
far as mini-batches make it matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.client.local import cross_entropy, local_update
from gradveil.core.types import Loss
from gradveil.models import Functional
from gradveil.threat.observation import Observation

_MOST = 8


def try_out(one: Observation, labels: Tensor, inputs: Tensor, key: str, loss: Loss = cross_entropy) -> Tensor:
    """The labels [n] that explain the update of parameter ``key`` best, starting from a guess.

    ``inputs`` [n, C, H, W] stand in for the private ones. A guess for more than eight examples is left as it is: there
    the counts are what matters, and trying out would take longer than the attack.
    """
    recipe = one.recipe
    if recipe is None or len(labels) > _MOST:
        return labels
    model = Functional(one.module, train_mode=recipe.train_mode)

    def distance(candidate: Tensor) -> Tensor:
        update = local_update(model, loss, one.sent, inputs, candidate, recipe)
        return (update[key] - one.reply[key]).square().sum()

    best, lowest = labels, distance(labels)
    for _ in range(3 * len(labels)):
        candidates = _neighbors(best, one.domain.classes)
        distances = vmap(distance, chunk_size=64)(candidates)
        if not bool(distances.min() < lowest):
            break
        best, lowest = candidates[distances.argmin()], distances.min()
    return best


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
