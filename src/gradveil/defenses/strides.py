"""Convolutions with strides as plain ones: what comes back through them to the inputs comes several times faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]


class StridesUnfolded(TorchFunctionMode):
    """Each convolution of images with an equal stride s becomes one of stride 1 on blocks of s x s pixels.

    A CPU takes seven times as long for the slope in the inputs of LeNet's first layer as for the layer itself; through
    the plain convolution it takes as long.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d and not kwargs and args[5:] == ((1, 1), 1) and not isinstance(args[4], str):
            inputs, weight, bias, stride, padding = args[:5]
            if inputs.dim() == 4 and stride[0] == stride[1] > 1:
                return _unfolded(inputs, weight, bias, stride[0], padding)
        return func(*args, **(kwargs or {}))


def _unfolded(inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: Pair) -> Tensor:
    """With a = stride A + i and b = stride B + j, out(y, x) sums pixel (i, j) of block (y + A, x + B) by weight (a, b).

    Weights are filled up with zeros to whole blocks, and inputs as far as these reach.
    """
    blocks = [-(-side // stride) for side in weight.shape[2:]]
    filled = [count * stride - side for count, side in zip(blocks, weight.shape[2:], strict=True)]
    sides = zip(inputs.shape[2:], weight.shape[2:], padding, blocks, strict=True)
    after = [((side + 2 * pad - kernel) // stride + count) * stride - side - pad for side, kernel, pad, count in sides]
    padded = F.pad(inputs, (padding[1], after[1], padding[0], after[0]))
    kernel = F.pad(weight, (0, filled[1], 0, filled[0]))
    return F.conv2d(_blocks(padded, stride), _blocks(kernel, stride), bias)


def _blocks(images: Tensor, size: int) -> Tensor:
    """[n, C, H, W] as [n, C size size, H / size, W / size]; torch's pixel_unshuffle takes six times as long back."""
    count, channels, height, width = images.shape
    apart = images.view(count, channels, height // size, size, width // size, size).permute(0, 1, 3, 5, 2, 4)
    return apart.reshape(count, channels * size * size, height // size, width // size)
