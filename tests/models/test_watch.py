"""Finding layers by what runs, not by the order in which they were written down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from gradveil.core.errors import GradveilError
from gradveil.domains import Images
from gradveil.models import build, classifier, first_layer, layers_in_order, representation, watched

GREY = Images(channels=1, height=4, width=4, classes=3, mean=(0.5,), std=(0.5,))


class Shuffled(nn.Module):
    """Registers its layers in another order than it runs them, and one that it never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.unused = nn.Linear(9, 9)
        self.middle = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 5), nn.Tanh())
        self.first = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x.flatten(1))))


def test_order_of_execution_decides() -> None:
    module = Shuffled()
    assert first_layer(module, GREY) == "first"
    assert classifier(module, GREY) == "last"
    represent = representation(module, GREY)
    inputs = torch.rand(2, 1, 4, 4)
    assert module.training
    assert not any(layer._forward_pre_hooks for layer in module.modules())
    expected = module.eval().middle(module.first(inputs.flatten(1)))
    torch.testing.assert_close(represent(inputs), expected)


def test_representation_differentiates_and_takes_other_parameters() -> None:
    module = Shuffled().eval()
    represent = representation(module, GREY)
    image = torch.rand(1, 4, 4)
    jacobian = jacrev(lambda x: represent(x[None])[0])(image)
    inner = torch.tanh(module.middle[1](module.first(image.flatten())))
    by_hand = (1 - inner.square())[:, None] * (module.middle[1].weight @ module.first.weight)
    torch.testing.assert_close(jacobian.flatten(1), by_hand)

    zeros = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
    assert float(represent(image[None], zeros).abs().sum()) == 0
    assert float(represent(image[None]).abs().sum()) > 0


def test_linear_classifier_is_both_first_and_last(cifar: Images) -> None:
    model = build("mlp:depth=0", cifar, seed=0)
    assert first_layer(model, cifar) == classifier(model, cifar) == "fc"
    inputs = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(representation(model, cifar)(inputs), inputs.flatten(1))


def test_models_without_such_layers_are_told_so() -> None:
    pooled = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    with pytest.raises(GradveilError, match="no classifier"):
        classifier(pooled, GREY)
    with pytest.raises(GradveilError, match="no first layer"):
        first_layer(nn.Flatten(), GREY)
    with pytest.raises(GradveilError, match="no weight of its own"):
        classifier(nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(16, 3))), GREY)
    with pytest.raises(GradveilError, match="called on single examples"):
        representation(Called("one by one"), GREY)(torch.rand(2, 1, 4, 4))


class Called(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fc = how, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        outputs: torch.Tensor = self.fc(input=flat) if self.how == "by name" else torch.stack(list(map(self.fc, flat)))
        return outputs


def test_a_classifier_may_be_called_by_the_name_of_its_argument() -> None:
    inputs = torch.rand(2, 1, 4, 4)
    torch.testing.assert_close(representation(Called("by name"), GREY)(inputs), inputs.flatten(1))


class Asked(nn.Module):
    """Calls its first layer by names of arguments alone, and its classifier twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.fc = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0]
        mixed, _ = self.attention(query=rows, key=rows, value=rows)
        outputs: Tensor = self.fc(mixed.flatten(1)) + self.fc(rows.flatten(1))
        return outputs


def test_every_call_is_seen_with_its_first_argument_and_no_hook_stays() -> None:
    module, inputs = Asked(), torch.rand(2, 1, 4, 4)
    calls: list[tuple[str, Tensor]] = []
    layers = {name: module.get_submodule(name) for name in ("fc", "attention")}
    with watched(layers, lambda name, x: calls.append((name, x))):
        module(inputs)
    assert [name for name, _ in calls] == ["attention", "fc", "fc"] == layers_in_order(module, GREY)
    assert torch.equal(calls[0][1], inputs[:, 0])
    assert torch.equal(calls[2][1], inputs.flatten(1))
    with pytest.raises(RuntimeError), watched(layers, lambda _name, _x: None):
        module(inputs[:, :, :3])
    assert not any(layer._forward_pre_hooks for layer in module.modules())
