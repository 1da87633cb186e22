"""How products of a network's gradient with many directions change with its inputs: one row for each product.

For one layer with inputs x and the gradient dy of the loss at its outputs, the product of its own gradient with a
direction is a function of x and dy alone. So each row begins as a gradient in x and dy of one layer, and all rows go
back to the inputs together, as one batch through weights that they share. Nothing as large as the parameters is carried
along, as it is where a whole gradient is differentiated.

Networks of rectifiers need one thing more. Where a unit switches, its part of the gradient jumps: between two pictures
gradients differ by the units that switched, and the derivative, taken where nothing switches, sees none of them. On an
untrained ResNet-18 it is a twelfth of what a step of one percent changes, and of no use for its direction. Here the
switch of a unit counts as a slope around its threshold, as wide as the step that is to be foreseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradveil.core.types import Params
from gradveil.engine import rules
from gradveil.engine.network import LayerCall, LayerPass

_RELU = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}


class SlopedSwitches(TorchFunctionMode):
    """Within it, derivatives of derivatives of rectifiers are slopes around 0; all else is as without it.

    ``widths`` [N] are the deviations of the slopes in units of what enters the rectifier, one for each problem; with 0
    there is no slope.
    """

    def __init__(self, widths: Tensor) -> None:
        super().__init__()
        self.widths = widths

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _RELU:
            return func(*args, **(kwargs or {}))
        values = args[0]
        each = rules.split_problems(values.detach(), len(self.widths)).flatten(1)
        width = self.widths * each.square().mean(dim=1).sqrt()
        by_example = width.repeat_interleave(len(values) // len(width)).view(-1, *[1] * (values.dim() - 1))
        return _Rectified.apply(values, by_example)  # type: ignore[no-untyped-call]


class _Rectified(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, width: Tensor) -> Tensor:
        ctx.save_for_backward(values, width)
        return values.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        return _Switched.apply(gradient[0], *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


class _Switched(Function):
    """What passes the switches of a layer, and how it changes with their inputs."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, values: Tensor, width: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, values, width)
        return gradient * (values > 0)

    @staticmethod
    def backward(ctx: Any, *change: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient, values, width = ctx.saved_tensors
        wide = width.clamp(min=torch.finfo(width.dtype).tiny)
        slope = (width > 0) * torch.exp(-0.5 * (values / wide).square()) / (wide * math.sqrt(2 * math.pi))
        return change[0] * (values > 0), change[0] * (gradient * slope), None


def gradient_rows(passed: LayerPass, directions: Sequence[Params], inputs: Tensor, at_once: int) -> Tensor:
    """How products of gradients change with ``inputs`` [N, ...]: [N, rows, ...], call by call.

    Args:
        passed: a pass from these inputs that can be differentiated once more.
        directions: for each call of the pass, by the layer's names of its parameters, [K, N, ...]: K products with
            the gradient in that parameter. Nothing for calls without any.
        inputs: what the pass was made from.
        at_once: rows that go back together.
    """
    found, waiting = list[Tensor](), list[tuple[LayerCall, tuple[Tensor, Tensor]]]()

    def go_back() -> None:
        ends, changes, first = list[Tensor](), list[Tensor](), 0
        total = sum(len(starts[0]) for _, starts in waiting)
        for call, starts in waiting:
            for end, start in zip((call.inputs, call.output_gradient), starts, strict=True):
                assert end is not None
                if end.requires_grad:
                    change = end.new_zeros((total, *end.shape))
                    change[first : first + len(start)] = start
                    ends.append(end)
                    changes.append(change)
            first += len(starts[0])
        found.extend(torch.autograd.grad(ends, inputs, changes, retain_graph=True, is_grads_batched=True))
        waiting.clear()

    for call, own in zip(passed.calls, directions, strict=True):
        count, whole = _side_by_side(call, own, passed.problems)
        for first in range(0, count, at_once):
            some = {name: tensor[first : first + at_once] for name, tensor in whole.items()}
            starts = _starts(call, some, passed.problems)
            if waiting and sum(len(other[0]) for _, other in waiting) + len(starts[0]) > at_once:
                go_back()
            waiting.append((call, starts))
    if waiting:
        go_back()
    return torch.cat(found).transpose(0, 1)


def _side_by_side(call: LayerCall, directions: Params, problems: int) -> tuple[int, Params]:
    """How many products there are, and their directions in all parameters of the layer: zero in all but one."""
    assert call.layer is not None
    count, first = sum(map(len, directions.values())), 0
    shapes = {name: parameter.shape for name, parameter in call.layer.named_parameters(recurse=False)}
    whole = {name: call.output_gradient.new_zeros((count, problems, *shape)) for name, shape in shapes.items()}
    for name, tensor in directions.items():
        whole[name][first : first + len(tensor)] = tensor
        first += len(tensor)
    return count, whole


def _starts(call: LayerCall, directions: Params, problems: int) -> tuple[Tensor, Tensor]:
    """Gradients [K, N * B, ...] of the products in what entered the layer, and in the gradient at what left it."""
    assert call.layer is not None
    assert call.inputs is not None
    count = len(next(iter(directions.values())))
    with torch.enable_grad():
        x, dy = (
            part.detach().expand(count, *part.shape).flatten(0, 1).requires_grad_()
            for part in (call.inputs, call.output_gradient)
        )
        own = {name: tensor.flatten(0, 1) for name, tensor in directions.items()}
        product = rules.along(call.layer, x, dy, count * problems, own)
    of_x, of_dy = torch.autograd.grad(product, (x, dy), materialize_grads=True, allow_unused=True)
    return of_x.view(count, -1, *of_x.shape[1:]), of_dy.view(count, -1, *of_dy.shape[1:])
