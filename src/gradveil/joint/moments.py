"""Two numbers for each tensor of a problem: how long its gradient is, and how far it goes along the observed one.

Some objectives ask for nothing else. A layer's gradient is the product D X' of the slopes at its outputs and of what
came in, over all positions. Where it has many more weights than positions, the factors tell both numbers: the squared
length is <D'D, X'X>, and the product with the observed gradient T is <D, T X>. So the gradient, gigabytes for a hundred
problems, is never formed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.trees import exact_norms
from gradveil.core.types import Params
from gradveil.joint import rules
from gradveil.joint.network import Call, gradients

WORTH = 2**20
"""Entries that are not formed, from which on it pays."""


class Moments(NamedTuple):
    """What is known of gradients and observed ones, [N] each."""

    product: Tensor
    """Of the two."""
    square: Tensor
    """The squared length of the gradient."""
    observed: Tensor
    """The squared length of the observed one."""


def total(parts: Iterable[Moments]) -> Moments:
    """The moments of all tensors together."""
    return Moments(*(torch.stack(numbers).sum(0) for numbers in zip(*parts, strict=True)))


def worth(calls: list[Call], problems: int, observed: Params) -> bool:
    """Whether enough of the observed gradient is in such layers; each layer has to be passed once, and seen whole."""
    names = [name for call in calls for name in call.parameters.values()]
    whole = all(_shown(call, observed) in (set(), set(call.parameters.values())) for call in calls)
    spared = [observed[call.parameters["weight"]][0].numel() for call in calls if _is_slim(call, problems, observed)]
    return len(set(names)) == len(names) and whole and sum(spared) >= WORTH


def moments(calls: list[Call], slopes: tuple[Tensor, ...], problems: int, observed: Params) -> dict[str, Moments]:
    """Those of each tensor of ``observed`` [N, ...], differentiable in what passed through the layers."""
    found: dict[str, Moments] = {}
    for call, slope in zip(calls, slopes, strict=True):
        if _shown(call, observed):
            way = _slim if _is_slim(call, problems, observed) else _formed
            found |= way(call, slope, problems, observed)
    return found


def _slim(call: Call, slope: Tensor, problems: int, observed: Params) -> dict[str, Moments]:
    assert call.layer is not None
    assert call.inputs is not None
    d, x = rules.FACTORS[type(call.layer)](call.layer, call.inputs, slope, problems)
    names = call.parameters
    weight = observed[names["weight"]]
    product = (d * (weight.flatten(2) @ x)).sum(dim=(1, 2))
    square = ((d.transpose(1, 2) @ d) * (x.transpose(1, 2) @ x)).sum(dim=(1, 2))
    found = {names["weight"]: Moments(product, square, _square(weight))}
    return found if "bias" not in names else {**found, names["bias"]: _between(d.sum(dim=2), observed[names["bias"]])}


def _formed(call: Call, slope: Tensor, problems: int, observed: Params) -> dict[str, Moments]:
    found = gradients([call], (slope,), problems)
    return {name: _between(tensor, observed[name]) for name, tensor in found.items()}


def _between(gradient: Tensor, observed: Tensor) -> Moments:
    own, seen = gradient.flatten(1), observed.flatten(1)
    return Moments((own * seen).sum(dim=1), own.square().sum(dim=1), _square(observed))


def _square(observed: Tensor) -> Tensor:
    return exact_norms(observed.flatten(1)).square()


def _is_slim(call: Call, problems: int, observed: Params) -> bool:
    """Whether the products of positions are less work than the gradient."""
    weight = observed.get(call.parameters.get("weight", ""))
    if weight is None or type(call.layer) not in rules.FACTORS:
        return False
    outputs, inputs = weight[0].flatten(1).shape
    positions = call.outputs.numel() // (problems * outputs)
    return positions * (outputs + inputs) < outputs * inputs


def _shown(call: Call, observed: Params) -> set[str]:
    return observed.keys() & set(call.parameters.values())
