"""Fronts: written before a model, built with it, and one module with it for everything that looks at models."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Recipe
from gradveil.domains import Images
from gradveil.models import (
    MODELS,
    Fronted,
    Functional,
    build,
    canonical,
    classifier,
    first_layer,
    is_import_path,
    representation,
    split_front,
)

DEEP = {"resnet34", "resnet50", "resnet152", "vgg16"}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {*DEEP, "features"}])
def test_every_family_behind_a_front(name: str, domain: Images) -> None:
    model = build(f"imprint:bins=8 > {name}", domain, seed=0)
    inputs = torch.rand(2, *domain.shape)
    assert isinstance(model, Fronted)
    assert not model.training
    assert model.front(inputs).shape == inputs.shape
    assert model(inputs).shape == (2, domain.classes)
    assert first_layer(model, domain) == "front.query"
    last = classifier(model, domain)
    assert last.startswith("model.")
    torch.testing.assert_close(model.get_submodule(last)(representation(model, domain)(inputs)), model(inputs))
    function = Functional(model)
    torch.testing.assert_close(function(function.params, inputs), model(inputs))


def test_the_model_behind_is_the_one_without_a_front(cifar: Images) -> None:
    alone, behind = build("lenet", cifar, seed=4), build("imprint > lenet", cifar, seed=4)
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter, behind.get_parameter(f"model.{name}"))


def test_a_front_comes_from_the_seed_alone_and_is_an_ordinary_layer(cifar: Images) -> None:
    before = torch.get_rng_state()
    first, again, other = (build("imprint:bins=64 > lenet", cifar, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first["front.query.weight"], again["front.query.weight"])
    assert not torch.equal(first["front.query.weight"], other["front.query.weight"])
    weight = first["front.query.weight"]
    assert weight.shape == (64, 3 * 32 * 32)
    assert weight.abs().max() <= (3 * 32 * 32) ** -0.5
    assert weight.std(dim=0).min() > 0.005, "rows differ"


def test_bins_of_a_sparse_front_are_idle_above_the_ceiling(cifar: Images) -> None:
    front = build("imprint:bins=4,kind=sparse,ceiling=0.5 > mlp", cifar, seed=0).front
    inputs = torch.rand(3, *cifar.shape)
    asked = front.query(inputs.flatten(1))
    expected = front.back(asked.clamp(0, 0.5)).view_as(inputs)
    torch.testing.assert_close(front(inputs), expected)
    relu = build("imprint:bins=4 > mlp", cifar, seed=0).front
    torch.testing.assert_close(relu(inputs), relu.back(F.relu(asked)).view_as(inputs))


def test_a_client_trains_behind_a_front(cifar: Images) -> None:
    client = SimulatedClient(
        build("imprint:bins=4 > mlp:hidden=8", cifar, seed=0), recipe=Recipe(sends="delta", epochs=2)
    )
    batch = Batch(torch.rand(3, *cifar.shape), torch.tensor([1, 2, 3]))
    update = client.reply(client.model.params, batch, Stream.seeded(0)).update
    assert update["front.back.weight"].abs().max() > 0


def test_one_spelling() -> None:
    assert canonical("imprint: kind=relu, bins=064>vit: dim=64, depth=02") == (
        "imprint:bins=64,kind=relu > vit:depth=2,dim=64"
    )
    assert canonical(" imprint > lenet") == "imprint > lenet"
    assert split_front("lenet:init=wide") == (None, "lenet:init=wide")
    assert canonical(canonical("imprint:ceiling=1e-6,kind=sparse > lenet")) == (
        "imprint:ceiling=1e-06,kind=sparse > lenet"
    )


def test_a_front_hides_no_import_path() -> None:
    """Files from outside may name a model, but never code to import."""
    for path in ("mypackage.nets:small", "nets:small:width=3"):
        assert is_import_path(f"imprint:bins=4 > {path}")
    assert not is_import_path("imprint:bins=4 > lenet:init=wide")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("imprnt > lenet", "did you mean imprint"),
        ("imprint:bins=1 > lenet", "bins is a whole number from 2"),
        ("imprint:kind=sparse,ceiling=0 > lenet", "ceiling is above 0"),
        ("imprint:rows=4 > lenet", "its options: bins=128"),
        ("imprint > imprint > lenet", "no front is called"),
        ("imprint >", "no model is called ''"),
        ("> lenet", "no front is called ''"),
    ],
)
def test_what_cannot_be_built_says_so(spec: str, said: str, cifar: Images) -> None:
    with pytest.raises(GradveilError, match=said):
        build(spec, cifar, seed=0)
