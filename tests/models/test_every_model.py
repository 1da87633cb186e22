"""One table over all registered models: what attacks and clients rely on holds for each as soon as it is there."""

from __future__ import annotations

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from gradveil.core import trees
from gradveil.core.types import Params
from gradveil.domains import Images
from gradveil.models import MODELS, Functional, build, classifier, first_layer, representation

TOO_LARGE = {"resnet152"}
"""Only its shapes are tested: its second derivatives take too long on a CPU."""

DEEP = {"resnet34", "resnet50", "vgg16"}

NAMES = [name for name in MODELS if name != "features"]
"""Public features need weights from outside, and derivatives of their pictures take too long: test_features.py."""

SMALL = {
    "lenet": "lenet:init=wide",
    "convnet": "convnet:width=4",
    "mlp": "mlp:hidden=16",
    "vit": "vit:patch=8,depth=2,dim=16,heads=2",
}
"""Versions small enough to compare derivatives with a loop and with finite differences."""


def slow_if_deep(name: str) -> ParameterSet:
    return pytest.param(name, marks=[pytest.mark.slow] if name in DEEP else [])


def spec_of(name: str) -> str:
    return SMALL.get(name, name)


def matching_problem(spec: str, domain: Images, problems: int) -> tuple[Functional, Tensor, Tensor, Params]:
    """A model in double precision, inputs [problems, 1, C, H, W], labels [problems, 1], a target for its gradient."""
    model = Functional(build(spec, domain, seed=3).double())
    rng = torch.Generator().manual_seed(1)
    inputs = torch.rand(problems, 1, *domain.shape, generator=rng, dtype=torch.float64)
    labels = torch.randint(domain.classes, (problems, 1), generator=rng)
    target = trees.map_each(lambda p: torch.randn(p.shape, generator=rng, dtype=p.dtype), model.params)
    return model, inputs, labels, target


def loss(model: Functional, params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(params, inputs), labels)


def mismatch(model: Functional, inputs: Tensor, labels: Tensor, target: Params) -> Tensor:
    """What gradient matching minimises over the inputs: a function of the gradient of the parameters."""
    gradient = grad(lambda params: loss(model, params, inputs, labels))(model.params)
    return trees.dot(gradient, target) + trees.dot(gradient, gradient)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to rounding, measured against the size of the whole tensor."""
    assert float((actual - expected).norm()) <= 1e-9 * float(expected.norm())


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_structure(name: str, domain: Images) -> None:
    model = build(name, domain, seed=0)
    inputs = torch.rand(2, *domain.shape)
    assert not model.training
    assert model(inputs).shape == (2, domain.classes)
    assert not any(isinstance(m, torch.nn.ReLU) and m.inplace for m in model.modules())

    last = model.get_submodule(classifier(model, domain))
    assert isinstance(last, torch.nn.Linear)
    assert last.out_features == domain.classes
    # The classifier on the representation is the model itself.
    torch.testing.assert_close(last(representation(model, domain)(inputs)), model(inputs))
    first = model.get_submodule(first_layer(model, domain))
    assert first.weight is next(p for p in model.parameters() if p.ndim > 1 and p.shape[0] > 1)


@pytest.mark.parametrize("name", [slow_if_deep(name) for name in NAMES if name not in TOO_LARGE])
def test_initialisation_comes_from_the_seed_alone(name: str, cifar: Images) -> None:
    before = torch.get_rng_state()
    first = build(name, cifar, seed=5).state_dict()
    torch.rand(3)  # moves the global generator between the two
    again, other = build(name, cifar, seed=5).state_dict(), build(name, cifar, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    torch.set_rng_state(before)
    build(name, cifar, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [slow_if_deep(name) for name in NAMES if name not in {*SMALL, *TOO_LARGE}])
def test_large_models_differentiate_twice(name: str, cifar: Images) -> None:
    model, inputs, labels, target = matching_problem(name, cifar, problems=1)
    params = {key: value.requires_grad_() for key, value in model.params.items()}
    inputs.requires_grad_()
    gradient = torch.autograd.grad(loss(model, params, inputs[0], labels[0]), list(params.values()), create_graph=True)
    objective = trees.dot(dict(zip(params, gradient, strict=True)), target)
    (second,) = torch.autograd.grad(objective, inputs)
    assert torch.isfinite(second).all()
    assert float(second.norm()) > 0


@pytest.mark.parametrize("name", SMALL)
def test_second_derivatives_match_finite_differences(name: str, cifar: Images) -> None:
    model, inputs, labels, target = matching_problem(spec_of(name), cifar, problems=1)
    along = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    slope = (grad(lambda x: mismatch(model, x, labels[0], target))(inputs[0]) * along).sum()
    step = 1e-6
    ahead, behind = (mismatch(model, inputs[0] + sign * step * along, labels[0], target) for sign in (1, -1))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-5, atol=0)


@pytest.mark.integration
@pytest.mark.parametrize("name", [*SMALL, "resnet18"])
def test_vmap_equals_a_loop(name: str, cifar: Images) -> None:
    problems = 3 if name in SMALL else 2
    model, inputs, labels, target = matching_problem(spec_of(name), cifar, problems)

    def direction(x: Tensor, y: Tensor) -> Tensor:
        return grad(lambda x: mismatch(model, x, y, target))(x)

    together = vmap(direction)(inputs, labels)
    for index in range(problems):
        assert_close(together[index], direction(inputs[index], labels[index]))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # inside torch's own jvp
@pytest.mark.parametrize("name", [*SMALL, "resnet18", "resnet18:stem=imagenet"])
def test_forward_over_reverse_equals_double_backward(name: str, cifar: Images) -> None:
    """With G the gradient of the parameters and v = dD/dG: dD/dx is the derivative of grad_x along v."""
    model, inputs, labels, target = matching_problem(spec_of(name), cifar, problems=1)
    x, y = inputs[0], labels[0]
    backward = grad(lambda x: mismatch(model, x, y, target))(x)
    gradient = grad(lambda params: loss(model, params, x, y))(model.params)
    v = trees.add(target, gradient, scale=2.0)
    forward = jvp(lambda params: grad(lambda x: loss(model, params, x, y))(x), (model.params,), (v,))[1]
    assert_close(forward, backward)
