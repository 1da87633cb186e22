"""Lengths of gradients that are not formed, also where a crafted broadcast drives numbers to the ends of float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil.core.trees import norm
from gradveil.defenses import clip
from gradveil.engine import LayerPass, SharedNetwork, examples, products
from gradveil.engine.network import LayerCall, UnsupportedError
from steps import SAMPLES, step_of


def passed(x: Tensor, d: Tensor) -> LayerPass:
    """One pass of x [N, positions, in] through a linear layer, and the gradients d [N, positions, out] at it."""
    layer = nn.Linear(x.shape[-1], d.shape[-1])
    return LayerPass(
        SharedNetwork(layer, dict(layer.named_parameters()), train_mode=None), d, [LayerCall("fc", layer, x, d)], len(x)
    )


def found(x: Tensor, d: Tensor) -> Tensor:
    one = passed(x, d)
    assert products._is_slim(one.calls[0], len(x)), "else its gradient is formed"
    return products.lengths(one, {"fc.weight": None, "fc.bias": None}.keys())[0]


def right(x: Tensor, d: Tensor) -> Tensor:
    weight, bias = torch.einsum("nlo,nli->noi", d.double(), x.double()), d.double().sum(dim=1)
    return (weight.square().sum(dim=(1, 2)) + bias.square().sum(dim=1)).sqrt().float()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("activation", [1e-12, 1.0, 1e10, 1e15, 1e17, 1e20, 1e25])
@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
def test_lengths_are_right_for_activations_of_any_size(activation: float, length: float) -> None:
    x, d = activation * drawn(3, 5, 64), length / activation * drawn(3, 5, 48)
    torch.testing.assert_close(found(x, d), right(x, d), rtol=1e-4, atol=0)


@pytest.mark.parametrize("constant", [1e2, 1e3])
def test_lengths_are_right_where_positions_nearly_cancel(constant: float) -> None:
    """As behind a norm layer, whose gradients sum to zero: in float32 the large constant takes all digits."""
    d = drawn(3, 8, 48).double()
    d = (d - d.mean(dim=1, keepdim=True)).float()
    x = constant + drawn(3, 8, 64)
    torch.testing.assert_close(found(x, d), right(x, d), rtol=1e-3, atol=0)


def test_what_cannot_be_told_is_infinite_and_never_short() -> None:
    """Activations that cancel but for rounding, or that are as large as float32 can hold."""
    d = drawn(3, 8, 48)
    d = torch.cat([d, -d], dim=1)
    assert found(torch.full((3, 16, 64), 1e9), d).isinf().all()
    assert found(torch.full((3, 8, 64), 3e38), drawn(3, 8, 48)).isinf().all()
    assert found(torch.full((3, 8, 64), torch.nan), drawn(3, 8, 48)).isinf().all()


def test_an_extreme_problem_does_not_change_the_length_of_others() -> None:
    x, d = drawn(3, 5, 64), drawn(3, 5, 48)
    alone = found(x, d)
    x[0] *= 1e25
    assert torch.equal(found(x, d)[1:], alone[1:])


def test_two_calls_with_one_parameter_are_refused() -> None:
    """The length of a sum is not that of its parts."""
    one = passed(drawn(3, 5, 64), drawn(3, 5, 48))
    with pytest.raises(UnsupportedError, match="two calls"):
        products.lengths(replace(one, calls=one.calls * 2), {"fc.weight": None, "fc.bias": None}.keys())


def test_an_example_without_a_gradient_has_length_zero() -> None:
    assert (found(drawn(3, 5, 64), torch.zeros(3, 5, 48)) == 0).all()


class Loud(nn.Module):
    """Its broadcast makes the inputs of one layer very large, and the gradients at its outputs very small."""

    def __init__(self, before: float, after: float) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.enter, self.wide = nn.Linear(3072, 1024, bias=False), nn.Linear(1024, 1024, bias=False)
        self.last = nn.Linear(1024, 10, bias=False)
        with torch.no_grad():
            self.wide.weight *= 1e-4  # so that nearly all of the gradient is that of this layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.wide(self.enter(x.flatten(1)) * self.before) * self.after)
        return outputs


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [
        (1.0, 1e-2, "unformed"),
        (6e17, 1e-21, "unformed"),
        (1e22, 1e-25, "unformed"),
        (1e35, 1e-37, "formed"),
        (1.0, 1e30, "formed"),
    ],
)
def test_no_broadcast_makes_an_example_longer_than_the_bound(
    before: float, after: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    _, step = step_of(Loud(before, after), SAMPLES.batch(range(1)))
    monkeypatch.setattr(examples, "_complaint", lambda _step: "")  # the layer rules cover it
    ways, bound, formed = [], 1e-3, clip._formed
    monkeypatch.setattr(clip, "_formed", lambda *given: ways.append("formed") or formed(*given))
    assert not float(norm(step.gradient())) < 2 * bound, "it is longer, or beyond numbers"
    assert float(norm(clip.clipped_mean(step, bound))) <= 1.001 * bound
    assert (ways or ["unformed"]) == [way]
