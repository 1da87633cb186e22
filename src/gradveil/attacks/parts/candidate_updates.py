"""The update that each of many candidates would have caused by itself, a group of candidates at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil import joint
from gradveil.client.local import local_update
from gradveil.core.precise import without_tf32
from gradveil.core.trees import stack
from gradveil.core.types import Params, Recipe
from gradveil.models import Functional
from gradveil.threat.observation import Observation

BYTES_AT_ONCE = {"cpu": 2**28, "cuda": 2**33}
"""Bytes that the updates of candidates may take together; one of them may take more."""
MOST = 250
"""Candidates in a group at most: activations take memory too."""
_judged: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""By model, whether the layer rules give its gradients."""

Updates = Callable[[Tensor, Tensor], Params]
"""(inputs [c, C, H, W], labels [c]) -> the update of each candidate alone, [c, ...] by name."""


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

    One pass of a batch through the shared weights serves all candidates where the model's layers allow that; elsewhere
    every candidate runs the local steps on weights of its own.
    """
    recipe = one.recipe or Recipe(sends=one.kind)
    try:
        shared = _shared(one, recipe)
        if one.module not in _judged:
            _judged[one.module] = _right(one)
        return shared if _judged[one.module] else _each_alone(one, recipe)
    except joint.UnsupportedError:
        return _each_alone(one, recipe)


def _shared(one: Observation, recipe: Recipe) -> Updates:
    if recipe.sends != "gradient":
        raise joint.UnsupportedError("each candidate trains its own weights")
    network = joint.SharedNetwork(one.module, one.sent, train_mode=recipe.train_mode)

    def updates(inputs: Tensor, labels: Tensor) -> Params:
        with without_tf32(), torch.enable_grad():
            _, calls, slopes = network.derived(one.loss, inputs.unsqueeze(1).requires_grad_(), labels.unsqueeze(1))
        with without_tf32(), torch.no_grad():
            return joint.gradients(calls, slopes, len(inputs))

    return updates


def _right(one: Observation) -> bool:
    """Whether the shared pass gives the gradients that backward gives, judged by a few random inputs.

    Code may go around its layers, or edit what left them. In eval mode, for one example may be too few for batch norm.
    """
    start, model, recipe = next(iter(one.sent.values())), Functional(one.module), Recipe()
    shared = _shared(one, recipe)
    drawn = joint.random_inputs(one.domain.shape).to(start)
    labels = torch.arange(joint.FEW, device=start.device) % one.domain.classes

    def right(point: Params) -> bool:
        inputs, each = point["inputs"], [slice(i, i + 1) for i in range(joint.FEW)]
        with without_tf32():
            alone = [local_update(model, one.loss, one.sent, inputs[i], labels[i], recipe) for i in each]
        return joint.same_gradients(shared(inputs, labels), stack(alone))

    return joint.agree_nearby(right, {"inputs": drawn})


def _each_alone(one: Observation, recipe: Recipe) -> Updates:
    model = Functional(one.module, train_mode=recipe.train_mode)

    def alone(inputs: Tensor, label: Tensor) -> Params:
        return local_update(model, one.loss, one.sent, inputs.unsqueeze(0), label.unsqueeze(0), recipe)

    def updates(inputs: Tensor, labels: Tensor) -> Params:
        with without_tf32():
            return vmap(alone)(inputs, labels)

    return updates
