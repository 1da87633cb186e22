"""Models in a subspace: what is trained, along which directions, and that a defense sees nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from gradveil import models
from gradveil.core.errors import GradveilError
from gradveil.core.types import Params
from gradveil.data import load
from gradveil.domains import Images
from gradveil.federated import Federation, Training
from gradveil.models import Subspace, subspace, trained_parameters
from gradveil.models.subspace import Adapter, in_subspace

SPECS = {
    "random": "subspace:dimensions=40,model=lenet",
    "public": "subspace:kind=public,dimensions=40,model=lenet",
    "layers": "subspace:kind=layers,dimensions=40,model=lenet",
}


@pytest.fixture(autouse=True)
def few_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subspace, "PUBLIC", ("cifar10-samples",))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_model_starts_where_the_whole_one_does_and_trains_few_numbers(spec: str, cifar: Images) -> None:
    model, whole = models.build(spec, cifar, seed=3), models.build("lenet", cifar, seed=3)
    shown = torch.rand(2, 3, 32, 32)
    trained = trained_parameters(model)
    last = sum(p.numel() for p in list(whole.parameters())[-2:])
    assert last < sum(p.numel() for p in trained.values()) <= last + 40
    torch.testing.assert_close(model(shown), models.build(spec, cifar, seed=3)(shown))  # the seed is all there is
    moved = functional_call(model, {name: p + 1.0 for name, p in trained.items()}, shown)
    assert not torch.allclose(moved, model(shown))


@pytest.mark.parametrize("kind", ["random", "public"])
def test_the_gradient_in_coordinates_is_that_of_the_model_along_orthonormal_directions(
    kind: str, cifar: Images
) -> None:
    model = models.build(SPECS[kind], cifar, seed=0)
    assert isinstance(model, Subspace)
    torch.testing.assert_close(model.directions.T @ model.directions, torch.eye(40), atol=1e-4, rtol=0)
    shown, labels = torch.rand(3, 3, 32, 32), torch.tensor([0, 4, 2])

    def loss(of: nn.Module, params: Params) -> torch.Tensor:
        return F.cross_entropy(functional_call(of, params, shown), labels)

    along = grad(lambda p: loss(model, p))(trained_parameters(model))["coordinates"]
    own = {name: p.detach() for name, p in model.model.named_parameters()}
    whole = grad(lambda p: loss(model.model, p))(own)
    flat = torch.cat([whole[name].flatten() for name in own if not name.startswith("fc")])
    torch.testing.assert_close(along, model.directions.T @ flat, atol=1e-5, rtol=1e-3)


def test_public_directions_are_those_that_gradients_of_photographs_take_most(cifar: Images) -> None:
    model = models.build(SPECS["public"], cifar, seed=0)
    other = models.build(SPECS["random"], cifar, seed=0)
    assert isinstance(model, Subspace)
    assert isinstance(other, Subspace)
    batch = load("cifar10-samples").batch(range(20))
    own = {name: p.detach() for name, p in model.model.named_parameters()}
    whole = grad(lambda p: F.cross_entropy(functional_call(model.model, p, batch.inputs), batch.labels))(own)
    flat = torch.cat([whole[name].flatten() for name in own if not name.startswith("fc")])
    kept, by_chance = ((m.directions.T @ flat).norm() / flat.norm() for m in (model, other))
    assert kept > 3 * by_chance


def test_an_adapter_is_a_layer_whose_weight_moves_by_a_square_between_fixed_ends() -> None:
    torch.manual_seed(0)
    for layer, shown in (
        (nn.Linear(12, 9), torch.rand(4, 12)),
        (nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.rand(4, 3, 9, 9)),
    ):
        adapter = Adapter(layer, 5)
        torch.testing.assert_close(adapter(shown), layer(shown))
        assert [n for n, p in adapter.named_parameters() if p.requires_grad and "layer" not in n] == ["square.weight"]
        nn.init.normal_(adapter.square.weight)
        into, square, out = (part.weight.flatten(1) for part in (adapter.into, adapter.square, adapter.out))
        layer.weight.data += (out @ square @ into).view_as(layer.weight)
        expected, adapter.square.weight.data = layer(shown), torch.zeros_like(adapter.square.weight)
        torch.testing.assert_close(adapter(shown), expected)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_veil_bounds_what_leaves_and_nothing_else_leaves(spec: str) -> None:
    data = load("cifar10-samples").subset(range(12))
    case = Training(
        data="cifar10-samples", model=spec, clients=2, rounds=1, algorithm="fedsgd", batch_size=None, lr=1.0,
        train_mode=False, defense="veil:rounds=1,mu=1000,bound=0.01",
    )  # fmt: skip
    federation = Federation(case, data)
    sent: list[Params] = []
    federation.on_exchange = lambda one: sent.append(one.update)
    federation.round(1)
    assert all(each.keys() == trained_parameters(federation.module).keys() for each in sent)
    lengths = [float(torch.cat([t.flatten() for t in each.values()]).norm()) for each in sent]
    assert all(0.001 < length < 0.012 for length in lengths)  # clipped to 0.01, and next to no noise


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("subspace:dimensions=0", "at least 1"),
        ("subspace:model=features", "few numbers already"),
        ("subspace:model=lenet,dimensions=99999", "too many"),
        ("subspace:model=nothing", "nothing"),
        ("subspace:kind=public,dimensions=200,model=lenet", "at most"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(spec: str, says: str, cifar: Images) -> None:
    with pytest.raises(GradveilError, match=says):
        models.build(spec, cifar, seed=0)


def test_a_model_of_ones_own_goes_into_a_subspace_too(cifar: Images) -> None:
    own = nn.Sequential(nn.Flatten(), nn.Linear(3072, 20), nn.ReLU(), nn.Linear(20, 10))
    model = in_subspace(own, cifar, dimensions=30)
    assert sum(p.numel() for p in trained_parameters(model).values()) == 30 + 210
