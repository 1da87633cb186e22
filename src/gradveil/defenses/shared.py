"""The network of a local step as one through which examples go together, each with a gradient of its own."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradveil import joint
from gradveil.core.precise import without_tf32
from gradveil.core.types import Batch, Params
from gradveil.defenses.base import Step
from gradveil.joint import moments

_FEW_WEIGHTS = "with so few weights it is quicker to form the gradient of every example"
_judged: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], str]] = WeakKeyDictionary()
"""By model and trained parameters, why examples do not go through it together; empty where they do."""


def network_of(step: Step) -> joint.SharedNetwork:
    """The model at the parameters of a step; raises UnsupportedError where its examples cannot or need not share it."""
    if sum(tensor.numel() for tensor in step.params.values()) < moments.WORTH:
        raise joint.UnsupportedError(_FEW_WEIGHTS)
    everything = {**step.frozen, **step.params}
    if len({tensor.device for tensor in everything.values()}) > 1:
        raise joint.UnsupportedError("the model is spread over several devices")
    module = step.model.module
    own = dict(module.named_buffers())
    if any(not torch.equal(own[name], buffer) for name, buffer in step.model.buffers.items()):
        raise joint.UnsupportedError("the batch has draws of its own")
    judged, trained = _judged.setdefault(module, {}), tuple(step.params)
    network = partial(joint.SharedNetwork, module, everything, train_mode=None)
    if trained not in judged:
        judged[trained] = _complaint(network(), step)
    if judged[trained]:
        raise joint.UnsupportedError(judged[trained])
    return network()


def passed(
    network: joint.SharedNetwork, step: Step, batch: Batch
) -> tuple[Tensor, list[joint.Call], tuple[Tensor, ...]]:
    """What the model says of each example alone, [n, classes], and what the gradient of each is made of."""
    with torch.enable_grad():
        alone = batch.inputs.detach().unsqueeze(1).requires_grad_()
        says, calls, slopes = network.derived(step.loss, alone, batch.labels.unsqueeze(1))
    return says[:, 0].detach(), calls, slopes


class Examples:
    """Gradients of single examples of a step: a large model takes them through shared weights, others by vmap."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._network: joint.SharedNetwork | None
        try:
            self._network = network_of(step)
        except joint.UnsupportedError:
            self._network = None

    def gradients(self, batch: Batch) -> Params:
        """That of every one of these examples, [n, ...] by name."""
        if self._network is None:
            return self._step.example_gradients(batch)
        _, calls, slopes = passed(self._network, self._step, batch)
        with torch.no_grad():
            found = joint.gradients(calls, slopes, len(batch), self._step.params.keys())
        return {name: found[name] for name in self._step.params}


def _complaint(network: joint.SharedNetwork, step: Step) -> str:
    """Why examples better not share it, judged by a few random inputs; empty if they may.

    Code may go around its layers, or put the examples along another axis than the first: then the layer rules give an
    example another gradient than it has alone. The client's own examples would not do: two that are equal hide that.
    """
    own = step.batch.inputs
    drawn = joint.random_inputs(own.shape[1:]).to(own)
    labels = step.batch.labels[:1].repeat_interleave(joint.FEW, dim=0)
    with without_tf32():
        _, calls, _ = passed(network, step, Batch(drawn, labels))
        if not moments.worth(calls, joint.FEW, step.params.keys()):
            return _FEW_WEIGHTS

        def right(point: Params) -> bool:
            some = Batch(point["inputs"], labels)
            _, calls, slopes = passed(network, step, some)
            with torch.no_grad():
                found: Params = joint.gradients(calls, slopes, joint.FEW, step.params.keys())
            return joint.same_gradients(found, step.example_gradients(some))

        same = joint.agree_nearby(right, {"inputs": drawn})
    return "" if same else "the layer rules do not give the gradients of this model's examples"
