"""Two numbers for each tensor of a problem: how long its gradient is, and how far it goes along the observed one.

Some objectives ask for nothing else. A layer's gradient is the product D X' of the gradients at its outputs and of
what came in, over all positions. Where it has many more weights than positions, the factors tell both numbers: the
squared length is <D'D, X'X>, and the product with the observed gradient T is <D, T X>. So the gradient, gigabytes for a
hundred problems, is never formed.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.trees import exact_norms
from gradveil.core.types import Params
from gradveil.engine import rules
from gradveil.engine.network import LayerCall, LayerPass, UnsupportedError, gradients

PAYS_OFF = 2**20
"""Entries that are not formed, from which on it pays."""
SMALL = 2**12
"""Up to so many entries, tensors are compared with the observed ones together."""


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


def pays_off(passed: LayerPass, names: KeysView[str]) -> bool:
    """Whether enough of these parameters is in such layers; each layer has to be passed once, and seen whole."""
    everything = [name for call in passed.calls for name in call.parameters.values()]
    whole = all(_shown(call, names) in (set(), set(call.parameters.values())) for call in passed.calls)
    spared = [_weight(call).numel() for call in passed.calls if _shown(call, names) and _is_slim(call, passed.problems)]
    return len(set(everything)) == len(everything) and whole and sum(spared) >= PAYS_OFF


def squares(observed: Params) -> dict[str, Tensor]:
    """The squared length of each tensor [N, ...] of observed gradients, [N] each."""
    return {name: exact_norms(tensor.flatten(1)).square() for name, tensor in observed.items()}


def moments(passed: LayerPass, observed: Params, squared: Mapping[str, Tensor]) -> dict[str, Moments]:
    """Those of each tensor of ``observed`` [N, ...], differentiable in what passed through the layers.

    ``squared`` is ``squares(observed)``, which stays as it is while candidates change.
    """
    products: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    small: Params = {}
    for call in passed.calls:
        if not _shown(call, observed.keys()):
            continue
        if _is_slim(call, passed.problems):
            d, x = _factors(call, passed.problems)
            weight = call.parameters["weight"]
            products[weight] = (d * (observed[weight].flatten(2) @ x)).sum(dim=(1, 2))
            own[weight] = ((d.transpose(1, 2) @ d) * (x.transpose(1, 2) @ x)).sum(dim=(1, 2))
            formed = {call.parameters["bias"]: d.sum(dim=2)} if "bias" in call.parameters else {}
        else:
            formed = gradients(replace(passed, calls=[call]))
        for name, tensor in formed.items():
            if tensor[0].numel() <= SMALL:
                small[name] = tensor
            else:
                products[name] = (tensor * observed[name]).flatten(1).sum(dim=1)
                own[name] = tensor.square().flatten(1).sum(dim=1)
    if small:
        both, alone = _in_one_go(small, {name: observed[name] for name in small})
        products |= both
        own |= alone
    return {name: Moments(products[name], own[name], squared[name]) for name in products}


def _in_one_go(gradients: Params, observed: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Products and squares of many small tensors, by name, in a few kernels: one by one, starting them is the work."""
    own, seen = (torch.cat([tensor.flatten(1) for tensor in tree.values()], dim=1) for tree in (gradients, observed))
    sizes = tuple(tensor[0].numel() for tensor in gradients.values())
    members = _members(sizes, own.device, own.dtype)
    both, alone = ((own * other @ members).unbind(dim=1) for other in (seen, own))
    return dict(zip(gradients, both, strict=True)), dict(zip(gradients, alone, strict=True))


@cache
def _members(sizes: tuple[int, ...], device: torch.device, kind: torch.dtype) -> Tensor:
    """[entries, tensors]: 1 where an entry is of a tensor. Kept for good, for captured graphs go on reading it."""
    tensors = torch.arange(len(sizes), device=device)
    of_entries = tensors.repeat_interleave(torch.tensor(sizes, device=device))
    return (of_entries[:, None] == tensors).to(kind)


def lengths(passed: LayerPass, names: KeysView[str]) -> tuple[Tensor, Params]:
    """[N]: how long the gradient of each problem is, over all of these parameters; infinity where nobody can tell.

    Beside it the gradients that were formed for that, [N, ...] by name: all but the weights of slim layers. Their
    lengths are those of these very numbers. Formed again, in a sum over problems, they could be rounded otherwise.

    A crafted broadcast can make activations so large and gradients at outputs so small that their squares leave
    float32, or sums of products that nearly cancel. A length that this may have touched is computed again in float64.
    Infinity is for lengths whose square float32 cannot hold, and for gradients that are mostly rounding once summed in
    float32.
    Raises UnsupportedError where two calls share a parameter: the length of their sum is not that of the parts.
    """
    used = [name for call in passed.calls for name in call.parameters.values()]
    if len(set(used)) < len(used):
        raise UnsupportedError("a parameter is used by two calls")
    sent = passed.calls[0].output_gradient.dtype
    kind = torch.promote_types(sent, torch.float32)
    square, doubt, formed = _squared_lengths(passed, names, kind)
    sure = square.isfinite() & (doubt <= 1e-3 * square + 1e-30)  # false for NaN
    if not sure.all():
        exact, doubt, _ = _squared_lengths(passed, names, torch.float64)
        exact = torch.where(doubt <= 1e2 * exact + 1e-30, exact, torch.inf)
        square = torch.where(sure, square.double(), exact)  # one problem does not change the length of another
    return square.to(kind).clamp(min=0).sqrt().to(sent), formed


def _squared_lengths(passed: LayerPass, names: KeysView[str], kind: torch.dtype) -> tuple[Tensor, Tensor, Params]:
    """[N] each: the squared lengths, computed in ``kind``, and how wrong float32 may make them; and what was formed."""
    parts, doubts, formed = [], [], Params()
    for call in passed.calls:
        if not _shown(call, names):
            continue
        if _is_slim(call, passed.problems):
            factors = _factors(call, passed.problems)
            if "bias" in call.parameters:
                formed[call.parameters["bias"]] = factors[0].sum(dim=2)
            d, x = (factor.to(kind) for factor in factors)
            of_d, of_x = d.transpose(1, 2) @ d, x.transpose(1, 2) @ x
            parts.append((of_d * of_x).sum(dim=(1, 2)))
            long_d, long_x = (products.diagonal(dim1=1, dim2=2).sum(dim=1) for products in (of_d, of_x))
            # Products are rounded in proportion to the lengths of the factors, and vanish below the smallest number.
            doubts.append(1e-6 * long_d * long_x + torch.finfo(kind).tiny * (long_d + long_x))
            if kind == torch.float64:  # gradients beside larger activations may underflow when scaled down
                parts.append(torch.where(long_x < 1e60, 0.0, torch.inf))
        else:
            formed |= gradients(replace(passed, calls=[call]))
    parts += [tensor.flatten(1).to(kind).square().sum(dim=1) for tensor in formed.values()]
    square = torch.stack(parts).sum(0)
    return square, torch.stack(doubts).sum(0) if doubts else torch.zeros_like(square), formed


def _factors(call: LayerCall, problems: int) -> tuple[Tensor, Tensor]:
    assert call.layer is not None
    assert call.inputs is not None
    return rules.FACTORS[type(call.layer)](call.layer, call.inputs, call.output_gradient, problems)


def _is_slim(call: LayerCall, problems: int) -> bool:
    """Whether the products of positions are less work than the gradient."""
    if type(call.layer) not in rules.FACTORS:
        return False
    outputs, inputs = _weight(call).flatten(1).shape
    positions = call.output_gradient.numel() // (problems * outputs)
    return positions * (outputs + inputs) < outputs * inputs


def _weight(call: LayerCall) -> Tensor:
    assert call.layer is not None
    weight = call.layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _shown(call: LayerCall, names: KeysView[str]) -> set[str]:
    return names & set(call.parameters.values())
