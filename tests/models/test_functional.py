"""A module as a pure function: equal to the module, silent about it, and able to train with batch norm under vmap."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.types import Params
from gradveil.domains import Images
from gradveil.models import Functional, build


@pytest.fixture
def model(cifar: Images) -> nn.Module:
    """A network with batch norm whose running statistics are not the initial ones."""
    built = build("convnet:width=4", cifar, seed=0).train()
    built(torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    return built.eval()


def test_equals_the_module_and_leaves_it_alone(model: nn.Module) -> None:
    model.train()
    before = copy.deepcopy(model.state_dict())
    inputs = torch.rand(4, 3, 32, 32)
    evaluated, trained = Functional(model), Functional(model, train_mode=True)
    outputs, batch_outputs = evaluated(evaluated.params, inputs), trained(trained.params, inputs)

    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert list(evaluated.params) == [name for name, _ in model.named_parameters()]
    assert not any(value.requires_grad for value in evaluated.params.values())
    torch.testing.assert_close(outputs, model.eval()(inputs))
    torch.testing.assert_close(batch_outputs, model.train()(inputs))


def test_params_are_its_own(model: nn.Module) -> None:
    function = Functional(model)
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert float(next(iter(function.params.values())).abs().sum()) > 0


def test_a_missing_parameter_is_an_error(model: nn.Module) -> None:
    function = Functional(model)
    params = dict(function.params)
    params.pop("linear.bias")
    with pytest.raises(RuntimeError, match=r"linear\.bias"):
        function(params, torch.rand(1, 3, 32, 32))


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 4)
            self.up.weight = self.down.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.down(x))

    module, inputs = Tied(), torch.rand(2, 4)
    function = Functional(module)
    assert set(function.params) == {"down.weight", "down.bias", "up.bias"}
    doubled = {**function.params, "down.weight": 2 * function.params["down.weight"]}
    with torch.no_grad():
        module.down.weight.mul_(2)
    torch.testing.assert_close(function(doubled, inputs), module(inputs))


@pytest.mark.parametrize("train_mode", [False, True])
def test_gradients_of_many_problems_equal_a_loop(model: nn.Module, train_mode: bool) -> None:
    function = Functional(model.double(), train_mode=train_mode)
    rng = torch.Generator().manual_seed(0)
    inputs = torch.rand(3, 2, 3, 32, 32, generator=rng, dtype=torch.float64)
    labels = torch.randint(10, (3, 2), generator=rng)

    def gradient(x: Tensor, y: Tensor) -> Params:
        return grad(lambda params: F.cross_entropy(function(params, x), y))(function.params)

    together = vmap(gradient)(inputs, labels)
    for index in range(3):
        alone = gradient(inputs[index], labels[index])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][index], value, rtol=1e-7, atol=1e-12)

    module = model.train(train_mode)
    expected = torch.autograd.grad(F.cross_entropy(module(inputs[0]), labels[0]), list(module.parameters()))
    for value, oracle in zip(together.values(), expected, strict=True):
        torch.testing.assert_close(value[0], oracle, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), nn.Dropout2d(0.1), nn.MultiheadAttention(4, 1, dropout=0.2)],
    ids=lambda m: type(m).__name__,
)
def test_dropout_is_refused_in_train_mode_by_name(layer: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(4, 4), layer)
    Functional(module)
    with pytest.raises(GradveilError, match="layer '1' drops out"):
        Functional(module, train_mode=True)


def test_dropout_of_rate_zero_is_none() -> None:
    function = Functional(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), train_mode=True)
    assert function(function.params, torch.rand(1, 4)).shape == (1, 4)
