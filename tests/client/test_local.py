"""The local run against torch's own SGD, and its derivative against finite differences."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch.func import grad

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import SimulatedClient, cross_entropy, local_update
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import dot
from gradveil.core.types import Batch, Recipe
from gradveil.defenses import DEFENSES, Defense
from gradveil.domains import Images
from gradveil.models import Functional

TINY = Images(1, 8, 8, 4, (0.5,), (0.25,))


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(sends="delta", lr=0.1),
        Recipe(sends="delta", lr=0.05, epochs=2, batch_size=2),
        Recipe(sends="delta", lr=0.05, epochs=2, batch_size=3, momentum=0.9, weight_decay=1e-2),
    ],
    ids=["one step", "mini-batches", "momentum and decay"],
)
@pytest.mark.parametrize("model", ["lenet", "convnet:width=8"])
def test_the_local_run_is_torchs_sgd(recipe: Recipe, model: str) -> None:
    module, batch = models.build(model, SAMPLES.domain, seed=0).double(), SAMPLES.batch(range(7))
    batch = Batch(batch.inputs.double(), batch.labels)
    trained = copy.deepcopy(module)
    optimizer = torch.optim.SGD(
        trained.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    for _ in range(recipe.epochs):
        for start in range(0, 7, recipe.batch_size or 7):
            part = batch.take(slice(start, start + (recipe.batch_size or 7)))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(trained(part.inputs), part.labels).backward()
            optimizer.step()
    update = (
        SimulatedClient(module, recipe=recipe).reply(dict(module.named_parameters()), batch, Stream.seeded(0)).update
    )
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(
            update[name], (parameter - module.get_parameter(name)).detach(), atol=1e-12, rtol=1e-9
        )


def test_fedsgd_sends_the_gradient() -> None:
    module, batch = models.build("lenet", SAMPLES.domain, seed=0), SAMPLES.batch(range(3))
    cross_entropy(module(batch.inputs), batch.labels).backward()
    update = (
        SimulatedClient(module, recipe=Recipe()).reply(dict(module.named_parameters()), batch, Stream.seeded(0)).update
    )
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(update[name], parameter.grad)


def test_the_local_run_can_be_differentiated_in_its_inputs() -> None:
    """Through two epochs of mini-batches with momentum, against central differences in double precision."""
    recipe = Recipe(sends="delta", lr=0.5, epochs=2, batch_size=2, momentum=0.9, weight_decay=0.01)
    model = Functional(models.build("mlp:hidden=6", TINY, seed=0).double())
    rng = generator(0)
    inputs = torch.rand(3, 1, 8, 8, generator=rng, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2])
    along = {k: torch.randn(v.shape, generator=rng, dtype=v.dtype) for k, v in model.params.items()}

    def value(x: torch.Tensor) -> torch.Tensor:
        return dot(local_update(model, cross_entropy, model.params, x, labels, recipe), along)

    direction = torch.randn(inputs.shape, generator=rng, dtype=torch.float64)
    step = 1e-5
    slope = (value(inputs + step * direction) - value(inputs - step * direction)) / (2 * step)
    torch.testing.assert_close((grad(value)(inputs) * direction).sum(), slope, rtol=1e-6, atol=1e-9)


def test_train_mode_uses_the_statistics_of_the_batch() -> None:
    module, batch = models.build("resnet18", SAMPLES.domain, seed=0), SAMPLES.batch(range(2))
    sent = dict(module.named_parameters())
    in_eval, in_train = (
        SimulatedClient(module, recipe=Recipe(train_mode=mode)).reply(sent, batch, Stream.seeded(0)).update
        for mode in (False, True)
    )
    assert not torch.allclose(in_eval["fc.weight"], in_train["fc.weight"], rtol=1e-2)


def test_a_diverging_run_is_an_error_and_not_an_update() -> None:
    module, batch = models.build("mlp", SAMPLES.domain, seed=0), SAMPLES.batch(range(2))
    client = SimulatedClient(module, recipe=Recipe(sends="delta", lr=1e30, epochs=5))
    with pytest.raises(GradveilError, match="lower the learning rate"):
        client.reply(dict(module.named_parameters()), batch, Stream.seeded(0))


@pytest.mark.parametrize("sends", ["gradient", "delta"])
def test_a_model_that_is_not_finite_is_named_and_not_the_learning_rate(sends: Literal["gradient", "delta"]) -> None:
    module, batch = models.build("mlp", SAMPLES.domain, seed=0), SAMPLES.batch(range(2))
    sent = dict(module.named_parameters())
    spoiled = sent | {(last := list(sent)[-1]): sent[last] * torch.nan}
    with pytest.raises(GradveilError, match=f"the model's parameters are not finite: '{last}' holds NaN") as caught:
        SimulatedClient(module, recipe=Recipe(sends=sends)).reply(spoiled, batch, Stream.seeded(0))
    assert "learning rate" not in str(caught.value)


class Spoiling(Defense):
    """Sends NaN."""

    def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]
        del step
        return {name: tensor * torch.nan for name, tensor in gradient.items()}


def test_one_gradient_is_sent_without_a_learning_rate_to_blame() -> None:
    module, batch = models.build("mlp", SAMPLES.domain, seed=0), SAMPLES.batch(range(2))
    client = SimulatedClient(module, recipe=Recipe(), defense=Spoiling())
    with pytest.raises(GradveilError, match="look at the inputs and the defense") as caught:
        client.reply(dict(module.named_parameters()), batch, Stream.seeded(0))
    assert "learning rate" not in str(caught.value)


def test_a_broadcast_of_another_model_is_refused() -> None:
    module, batch = models.build("mlp", SAMPLES.domain, seed=0), SAMPLES.batch(range(2))
    with pytest.raises(GradveilError, match="does not hold the parameters"):
        SimulatedClient(module, recipe=Recipe()).reply({}, batch, Stream.seeded(0))


class Halving(Defense):
    """Halves the first local step's gradient and counts what it saw."""

    def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]
        step.log.add("examples", len(step.batch))
        step.log.add("loss", step.loss_at(step.params))
        return {k: v / 2 if step.number == 1 else v for k, v in gradient.items()}


def test_a_defense_sees_every_local_step() -> None:
    module, batch = models.build("lenet", SAMPLES.domain, seed=0), SAMPLES.batch(range(5))
    recipe = Recipe(sends="delta", batch_size=2, lr=1e-4)
    reply = SimulatedClient(module, recipe=recipe, defense=Halving()).reply(
        dict(module.named_parameters()), batch, Stream.seeded(0)
    )
    means = reply.log.means()
    assert means["examples"] == pytest.approx(5 / 3)
    assert means["loss"] == pytest.approx(2.3, abs=0.3)


@pytest.mark.parametrize(
    "spec", ["dcs2:iterations=5", "dcs2plus:iterations=5", "dcs2:iterations=5,sensitive=label,label=3"]
)
@pytest.mark.parametrize("sends", ["gradient", "delta"])
def test_clients_side_by_side_reply_as_each_would_alone(spec: str, sends: Literal["gradient", "delta"]) -> None:
    module, batches = models.build("lenet", SAMPLES.domain, seed=0), [SAMPLES.batch([i, i + 20]) for i in range(3)]
    client = SimulatedClient(module, recipe=Recipe(sends=sends), defense=DEFENSES.build(spec))
    sent = client.model.params
    together = client.replies(sent, batches, [Stream.seeded(0, i) for i in range(3)])
    for i, (reply, batch) in enumerate(zip(together, batches, strict=True)):
        alone = client.reply(sent, batch, Stream.seeded(0, i))
        assert reply.log.means().keys() == alone.log.means().keys()
        for name, tensor in alone.update.items():
            torch.testing.assert_close(reply.update[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(sends="delta", epochs=2, weight_decay=0.1, momentum=0.9)])
def test_frozen_parameters_are_neither_trained_nor_sent(recipe: Recipe) -> None:
    module, batch = models.build("lenet", SAMPLES.domain, seed=0), SAMPLES.batch(range(2))
    whole = SimulatedClient(module, recipe=Recipe())
    expected = whole.reply(whole.model.params, batch, Stream.seeded(0)).update
    frozen, _ = next(iter(module.named_parameters()))
    next(module.parameters()).requires_grad_(False)
    client = SimulatedClient(module, recipe=recipe)
    update = client.reply(models.trained_parameters(module), batch, Stream.seeded(0)).update
    assert update.keys() == expected.keys() - {frozen}
    if recipe.sends == "gradient":
        assert all(torch.equal(tensor, expected[name]) for name, tensor in update.items())
    with pytest.raises(GradveilError, match="all parameters of the model are frozen"):
        SimulatedClient(module.requires_grad_(False), recipe=recipe)


def test_a_broadcast_in_another_precision_is_trained_on_in_the_clients_own() -> None:
    client = SimulatedClient(models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe())
    batch, halved = SAMPLES.batch(range(2)), {name: tensor.half() for name, tensor in client.model.params.items()}
    found = client.reply(halved, batch, Stream.seeded(0)).update
    expected = client.reply({name: tensor.float() for name, tensor in halved.items()}, batch, Stream.seeded(0)).update
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    with pytest.raises(GradveilError, match="does not hold the parameters"):
        client.reply({name: tensor.long() for name, tensor in halved.items()}, batch, Stream.seeded(0))
