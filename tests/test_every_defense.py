"""One table over every registered defense: whatever it does, it keeps shapes, arguments and determinism."""

from __future__ import annotations

import pytest
import torch

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import Client
from gradveil.core.seeding import generator
from gradveil.core.trees import detached
from gradveil.core.types import Recipe
from gradveil.defenses import DEFENSES

RECIPES = {"FedSGD": Recipe(), "FedAvg": Recipe(sends="delta", epochs=2, batch_size=2)}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@pytest.mark.parametrize("model", ["lenet", "convnet:width=8", "mlp", "vit:depth=1,dim=48"])
@pytest.mark.parametrize("name", list(DEFENSES))
def test_defense(name: str, model: str, recipe: Recipe) -> None:
    defense = DEFENSES.build(name)
    module = defense.on_model(models.build(model, SAMPLES.domain, seed=0))
    sent, batch = detached(dict(module.named_parameters())), SAMPLES.batch(range(4))
    before, inputs = detached(sent), batch.inputs.clone()
    client = Client(module, recipe=recipe, defense=defense)
    first, second = (client.reply(sent, batch, generator(7)).update for _ in range(2))
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in sent.items()}
    for key in first:
        assert torch.equal(first[key], second[key]), "the same generator gives the same update"
        assert torch.isfinite(first[key]).all()
        assert torch.equal(sent[key], before[key]), "the broadcast is not edited"
    assert torch.equal(batch.inputs, inputs), "the private batch is not edited"
