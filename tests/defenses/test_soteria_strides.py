"""A convolution with a stride and its plain form on blocks of pixels are the same function."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import vjp, vmap

from gradveil.defenses.soteria import StridesUnfolded


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [((32, 32), 5, 2, 2), ((31, 29), 3, 2, 1), ((28, 28), 7, 3, 0), ((16, 17), 1, 2, 0), ((9, 9), 4, 4, (1, 2))],
)
def test_outputs_and_slopes_are_the_same(
    size: tuple[int, int], kernel: int, stride: int, padding: int | tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Conv2d(3, 4, kernel, stride, padding).double(), torch.rand(2, 3, *size, dtype=torch.double)
    outputs, pull = vjp(layer, inputs)[:2]
    with StridesUnfolded():
        unfolded, back = vjp(layer, inputs)[:2]
    torch.testing.assert_close(unfolded, outputs)
    changes = torch.rand(3, *outputs.shape, dtype=torch.double)
    torch.testing.assert_close(vmap(back)(changes), vmap(pull)(changes))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, stride=(2, 1)),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.Conv2d(4, 4, 3, stride=2, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same"),
    ],
)
def test_other_convolutions_are_left_alone(layer: nn.Conv2d) -> None:
    inputs = torch.rand(2, 4, 9, 9)
    with StridesUnfolded():
        found = layer(inputs)
    assert torch.equal(found, layer(inputs))
