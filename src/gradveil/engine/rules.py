"""What each kind of layer adds to the gradient of its parameters, for many problems at once that share the layer.

With inputs x and the loss's gradient dy in the outputs of a layer, both of N problems of B examples flattened to N * B,
a rule gives the gradient of each problem apart, and the product of that gradient with a direction, differentiable in x
and dy. The product never forms the gradient: for a convolution it is dy times the convolution with the direction as
weights, which each problem has its own of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.types import Params

Rule = Callable[[Any, Tensor, Tensor, int], Params]
"""(layer, x, dy, problems) -> the gradients of the layer's own parameters, each [N, ...]."""

Along = Callable[[Any, Tensor, Tensor, int, Params], Tensor]
"""(layer, x, dy, problems, direction) -> the sum over problems of <gradient, direction>, a scalar."""

Factors = Callable[[Any, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(layer, x, dy, problems) -> D [N, O, L] and X [N, K, L] over L positions; the gradient in the weight is D X'."""


def gradients(layer: nn.Module, x: Tensor, dy: Tensor, problems: int) -> Params:
    """The gradient of each problem in the layer's own parameters."""
    return GRADIENTS[type(layer)](layer, x, dy, problems)


def along(layer: nn.Module, x: Tensor, dy: Tensor, problems: int, direction: Params) -> Tensor:
    """The summed product of those gradients with a direction of each problem."""
    product = PRODUCTS.get(type(layer))
    if product is not None:
        return product(layer, x, dy, problems, direction)
    found = gradients(layer, x, dy, problems)
    return torch.stack([(direction[name] * found[name]).sum() for name in found]).sum()


def split_problems(x: Tensor, problems: int) -> Tensor:
    """[N * B, ...] as [N, B, ...]."""
    return x.reshape(problems, -1, *x.shape[1:])


class FixedNorm(nn.Module):
    """Batch norm in eval mode: one multiplication and one addition, which can be differentiated twice as cheaply.

    torch's own derivative of its derivative is written for the general case and takes ten times as many passes.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.weight, self.bias = layer.weight, layer.bias
        with torch.no_grad():  # all of it is fixed, so that a pass need not work it out again
            scale = (layer.running_var + layer.eps).rsqrt()
            shift = -layer.running_mean * scale
            self._normal = scale, shift
            if self.weight is not None:
                scale, shift = scale * self.weight, shift * self.weight
            self._whole = scale, shift if self.bias is None else shift + self.bias

    def forward(self, x: Tensor) -> Tensor:
        return _scaled_and_shifted(x, *self._whole)

    def normalised(self, x: Tensor) -> Tensor:
        return _scaled_and_shifted(x, *self._normal)


class ProblemBatchNorm(nn.Module):
    """Batch norm in train mode with the statistics of each problem's own batch, not of all problems together."""

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.problems = 1

    def forward(self, x: Tensor) -> Tensor:
        normal = self.normalised(x)
        if self.weight is not None:
            normal = normal * _channels(self.weight, x)
        return normal if self.bias is None else normal + _channels(self.bias, x)

    def normalised(self, x: Tensor) -> Tensor:
        each = split_problems(x, self.problems)
        over = [1, *range(3, each.dim())]
        centered = each - each.mean(dim=over, keepdim=True)
        variance = centered.square().mean(dim=over, keepdim=True)
        return (centered / (variance + self.eps).sqrt()).flatten(0, 1)


def _scaled_and_shifted(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(_channels(shift, x), x, _channels(scale, x))


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """[C], to be broadcast over [n, C, ...]."""
    return values.view(-1, *[1] * (x.dim() - 2))


def _linear(layer: nn.Linear, x: Tensor, dy: Tensor, problems: int) -> Params:
    flat, rows = _linear_factors(layer, x, dy, problems)
    found = {"weight": flat @ rows.transpose(1, 2)}
    return found if layer.bias is None else {**found, "bias": flat.sum(dim=2)}


def _linear_factors(_layer: nn.Linear, x: Tensor, dy: Tensor, problems: int) -> tuple[Tensor, Tensor]:
    return _rows(dy, problems).transpose(1, 2), _rows(x, problems).transpose(1, 2)


def _linear_along(layer: nn.Linear, x: Tensor, dy: Tensor, problems: int, direction: Params) -> Tensor:
    x, dy = _rows(x, problems), _rows(dy, problems)
    moved = x @ direction["weight"].transpose(1, 2)
    if layer.bias is not None:
        moved = moved + direction["bias"][:, None]
    return (moved * dy).sum()


def _rows(x: Tensor, problems: int) -> Tensor:
    """[N * B, ..., features] as [N, positions, features]."""
    return x.reshape(problems, -1, x.shape[-1])


def _conv(layer: nn.Conv2d, x: Tensor, dy: Tensor, problems: int) -> Params:
    flat, columns = _conv_factors(layer, x, dy, problems)
    weight = flat @ columns.transpose(1, 2)
    found = {"weight": weight.view(problems, *layer.weight.shape)}
    return found if layer.bias is None else {**found, "bias": flat.sum(dim=2)}


def _conv_factors(layer: nn.Conv2d, x: Tensor, dy: Tensor, problems: int) -> tuple[Tensor, Tensor]:
    columns: Tensor = _Columns.apply(x, layer, problems)  # type: ignore[no-untyped-call]
    return _positions(dy, problems), columns


def _conv_along(layer: nn.Conv2d, x: Tensor, dy: Tensor, problems: int, direction: Params) -> Tensor:
    moved: Tensor = _ConvEach.apply(x, direction["weight"], layer)  # type: ignore[no-untyped-call]
    product = (moved * _positions(dy, problems)).sum()
    if layer.bias is None:
        return product
    return product + (direction["bias"] * _positions(dy, problems).sum(dim=2)).sum()


class _ConvEach(Function):
    """Convolution of each problem's examples with its own weights, as one batched matrix product: [N, O, positions]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, layer: nn.Conv2d) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(weights)
        return weights.flatten(2) @ _columns(layer, x, len(weights))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        columns = weights.flatten(2).transpose(1, 2) @ dy[0]
        return _uncolumns(ctx.layer, columns, ctx.shape), None, None


class _Columns(Function):
    """The patches under the kernel, and what comes back through them: torch's own way through the view is slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Conv2d, problems: int) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        return _columns(layer, x, problems)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None, None]:
        return _uncolumns(ctx.layer, dy[0].contiguous(), ctx.shape), None, None


def _positions(y: Tensor, problems: int) -> Tensor:
    """[N * B, O, H, W] as [N, O, B * H * W]."""
    return split_problems(y, problems).transpose(1, 2).flatten(2)


def _columns(layer: nn.Conv2d, x: Tensor, problems: int) -> Tensor:
    """The patches under the kernel, [N, C * k * k, B * positions], gathered by one copy out of a strided view."""
    (top, left), (down, right) = _pair(layer.padding), _pair(layer.stride)
    padded = split_problems(F.pad(x, (left, left, top, top)), problems)
    height, width = _outputs(layer, x.shape)
    n, b, c, i, j = padded.stride()
    (tall, wide), (gap, space) = _pair(layer.kernel_size), _pair(layer.dilation)
    size = (problems, layer.in_channels, tall, wide, padded.shape[1], height, width)
    view = padded.as_strided(size, (n, c, i * gap, j * space, b, i * down, j * right))
    columns: Tensor = view.reshape(problems, layer.in_channels * tall * wide, -1)
    return columns


def _uncolumns(layer: nn.Conv2d, columns: Tensor, shape: torch.Size) -> Tensor:
    """The transpose of ``_columns``: patches added up where they came from, [N * B, C, H, W]."""
    problems, rows = columns.shape[:2]
    patches = columns.view(problems, rows, shape[0] // problems, -1).transpose(1, 2).flatten(0, 1)
    kernel, gap, edge, step = (_pair(v) for v in (layer.kernel_size, layer.dilation, layer.padding, layer.stride))
    return F.fold(patches, shape[-2:], kernel, dilation=gap, padding=edge, stride=step)


def _outputs(layer: nn.Conv2d, shape: torch.Size) -> tuple[int, int]:
    found = []
    for axis, side in enumerate(shape[-2:]):
        kernel, gap = _pair(layer.kernel_size)[axis], _pair(layer.dilation)[axis]
        room = side + 2 * _pair(layer.padding)[axis] - gap * (kernel - 1) - 1
        found.append(room // _pair(layer.stride)[axis] + 1)
    return found[0], found[1]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _affine(layer: nn.Module, normal: Tensor, dy: Tensor, problems: int, features: int) -> Params:
    """Scale and shift after any normalisation; ``features`` counts the trailing axes that have their own parameters."""
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    found = {}
    for name, product in (("weight", normal * dy), ("bias", dy)):
        if name in names:
            per = split_problems(product, problems)
            found[name] = per.flatten(1, per.dim() - features - 1).sum(dim=1)
    return found


def _batch_norm(layer: FixedNorm | ProblemBatchNorm, x: Tensor, dy: Tensor, problems: int) -> Params:
    return _affine(layer, layer.normalised(x).movedim(1, -1), dy.movedim(1, -1), problems, 1)


def _layer_norm(layer: nn.LayerNorm, x: Tensor, dy: Tensor, problems: int) -> Params:
    normal = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    return _affine(layer, normal, dy, problems, len(layer.normalized_shape))


def _group_norm(layer: nn.GroupNorm, x: Tensor, dy: Tensor, problems: int) -> Params:
    normal = F.group_norm(x, layer.num_groups, eps=layer.eps)
    return _affine(layer, normal.movedim(1, -1), dy.movedim(1, -1), problems, 1)


GRADIENTS: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    FixedNorm: _batch_norm,
    ProblemBatchNorm: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
}
PRODUCTS: dict[type[nn.Module], Along] = {nn.Linear: _linear_along, nn.Conv2d: _conv_along}
FACTORS: dict[type[nn.Module], Factors] = {nn.Linear: _linear_factors, nn.Conv2d: _conv_factors}


def supports(layer: nn.Module) -> bool:
    """Whether a rule covers the layer as it is configured; one may have its weight made of other parameters."""
    if not {name for name, _ in layer.named_parameters(recurse=False)} <= {"weight", "bias"}:
        return False
    if isinstance(layer, nn.Conv2d):
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return type(layer) is nn.Conv2d and plain
    return type(layer) in GRADIENTS
