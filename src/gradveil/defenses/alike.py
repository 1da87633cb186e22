"""How alike the gradients of some examples are to wanted ones: all through shared weights, or each by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradveil import joint
from gradveil.core.trees import dot
from gradveil.core.types import Batch, Params
from gradveil.defenses.base import Step
from gradveil.defenses.shared import network_of, passed
from gradveil.joint import moments

Alike = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Inputs [M, C, H, W] -> the cosines [M] of their gradients to the wanted ones, and what the model says of the inputs,
[M, classes]; both have a slope in the inputs."""

_TINY = 1e-16
"""Keeps squared lengths of zero out of denominators, and their slopes finite."""


def alike_to(step: Step, targets: Batch, labels: Tensor) -> tuple[Alike, Tensor]:
    """How alike inputs under these labels [M] are to M targets, and what the model says of the targets.

    One pass of a batch serves all where the model's layers allow that and it is large; else every example is derived
    alone, which for few weights is quicker.
    """
    try:
        return _shared(step, targets, labels)
    except joint.UnsupportedError:
        return _each_alone(step, targets, labels)


def _shared(step: Step, targets: Batch, labels: Tensor) -> tuple[Alike, Tensor]:
    network, count = network_of(step), len(targets)
    says, calls, slopes = passed(network, step, targets)
    with torch.no_grad():
        wanted = joint.gradients(calls, slopes, count, step.params.keys())
        squared = moments.squares(wanted)

    def alike(inputs: Tensor) -> tuple[Tensor, Tensor]:
        said, calls, slopes = network.derived(step.loss, inputs.unsqueeze(1), labels.unsqueeze(1), again=True)
        found = moments.total(moments.moments(calls, slopes, count, wanted, squared).values())
        return _cosine(found.product, found.square, found.observed), said[:, 0]

    return alike, says


def _each_alone(step: Step, targets: Batch, labels: Tensor) -> tuple[Alike, Tensor]:
    def example(x: Tensor, label: Tensor) -> tuple[Params, Tensor]:
        """The gradient of one example and what the model says of it, from one pass."""

        def loss(params: Params) -> tuple[Tensor, Tensor]:
            said: list[Tensor] = []

            def noted(outputs: Tensor, targets: Tensor) -> Tensor:
                said.append(outputs)
                return step.loss(outputs, targets)

            value = step.model.loss(noted, {**step.frozen, **params}, x[None], label[None])
            return value, said[0][0]

        gradient, outputs = grad(loss, has_aux=True)(step.params)
        return gradient, outputs

    wanted, says = vmap(example)(targets.inputs, targets.labels)

    def one(x: Tensor, label: Tensor, wanted: Params) -> tuple[Tensor, Tensor]:
        gradient, said = example(x, label)
        # A model may be spread over several devices: everything comes back to that of the inputs.
        cosine = _cosine(dot(gradient, wanted), dot(gradient, gradient), dot(wanted, wanted))
        return cosine.to(x.device), said.to(x.device)

    return lambda inputs: vmap(one)(inputs, labels, wanted), says.to(targets.inputs.device)


def _cosine(product: Tensor, square: Tensor, other: Tensor) -> Tensor:
    """From the product of two vectors and their squared lengths."""
    return product / ((square + _TINY).sqrt() * (other + _TINY).sqrt())
