"""Two numbers for each problem: how long its gradient is, and how far it goes along the observed one.

Some objectives ask for nothing else. A layer's gradient is the product D X' of the slopes at its outputs and of what
came in, over all positions. Where it has many more weights than positions, the factors tell both numbers: the squared
length is <D'D, X'X>, and the product with the observed gradient T is <D, T X>. So the gradient, gigabytes for a hundred
problems, is never formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.attacks import rules
from gradveil.attacks.joint import Call, gradients
from gradveil.core.types import Params

WORTH = 2**20
"""Entries that are not formed, from which on it pays."""


def worth(calls: list[Call], problems: int, observed: Params) -> bool:
    """Whether enough of the observed gradient is in such layers; each layer has to be passed once, and seen whole."""
    names = [name for call in calls for name in call.parameters.values()]
    whole = all(_shown(call, observed) in (set(), set(call.parameters.values())) for call in calls)
    spared = [observed[call.parameters["weight"]][0].numel() for call in calls if _is_slim(call, problems, observed)]
    return len(set(names)) == len(names) and whole and sum(spared) >= WORTH


def moments(calls: list[Call], slopes: tuple[Tensor, ...], problems: int, observed: Params) -> tuple[Tensor, Tensor]:
    """The products with ``observed`` [N, ...] and the squared lengths, both [N], differentiable in what passed."""
    parts = [
        (_slim if _is_slim(call, problems, observed) else _formed)(call, slope, problems, observed)
        for call, slope in zip(calls, slopes, strict=True)
        if _shown(call, observed)
    ]
    products, squares = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    return products, squares


def _slim(call: Call, slope: Tensor, problems: int, observed: Params) -> tuple[Tensor, Tensor]:
    assert call.layer is not None
    assert call.inputs is not None
    d, x = rules.FACTORS[type(call.layer)](call.layer, call.inputs, slope, problems)
    names = call.parameters
    product = (d * (observed[names["weight"]].flatten(2) @ x)).sum(dim=(1, 2))
    square = ((d.transpose(1, 2) @ d) * (x.transpose(1, 2) @ x)).sum(dim=(1, 2))
    if "bias" not in names:
        return product, square
    bias = d.sum(dim=2)
    return product + (bias * observed[names["bias"]]).sum(dim=1), square + bias.square().sum(dim=1)


def _formed(call: Call, slope: Tensor, problems: int, observed: Params) -> tuple[Tensor, Tensor]:
    found = {name: tensor.flatten(1) for name, tensor in gradients([call], (slope,), problems).items()}
    products = [(tensor * observed[name].flatten(1)).sum(dim=1) for name, tensor in found.items()]
    squares = [tensor.square().sum(dim=1) for tensor in found.values()]
    return torch.stack(products).sum(0), torch.stack(squares).sum(0)


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
