"""One table over every registered defense: whatever it does, it keeps shapes, arguments and determinism."""

from __future__ import annotations

import pytest
import torch

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import detached
from gradveil.core.types import Recipe
from gradveil.defenses import DEFENSES, fresh

RECIPES = {"FedSGD": Recipe(), "FedAvg": Recipe(sends="delta", epochs=2, batch_size=2, lr=0.01)}
QUICK = {"dcs2": "dcs2:iterations=2", "dcs2plus": "dcs2plus:iterations=2"}
CHAINS = ["dcs2:iterations=2+noise:sigma=0.01", "clip:bound=1+noise:sigma=0.1", "ats+precode+clip", "dp+sparsify"]
SPECS = [QUICK.get(name, name) for name in DEFENSES] + CHAINS
SMALL = ["lenet", "convnet:width=8", "mlp", "vit:depth=1,dim=48"]
LARGE = ["resnet18", "vgg11", "resnet50"]
REFUSED = dict.fromkeys(("dp", "veil"), ("convnet", "resnet", "vgg"))
"""Models that a defense does not fit: batch norm mixes the examples that DP-SGD must keep apart."""


def fits(spec: str, model: str) -> bool:
    return not any(model.startswith(REFUSED.get(link.partition(":")[0], ())) for link in DEFENSES.links(spec))


def check(spec: str, model: str, recipe: Recipe) -> None:
    defense = DEFENSES.build(spec)
    module = defense.on_model(models.build(model, SAMPLES.domain, seed=0))
    sent, batch = detached(dict(module.named_parameters())), SAMPLES.batch(range(4))
    before, inputs = detached(sent), batch.inputs.clone()
    # copies: one that remembers what it sent before sends something else the next time
    clients = [SimulatedClient(module, recipe=recipe, defense=fresh(defense)) for _ in range(2)]
    first, second = (client.reply(sent, batch, Stream.seeded(7)).update for client in clients)
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in sent.items()}
    for key in first:
        assert torch.equal(first[key], second[key]), "the same generator gives the same update"
        assert torch.isfinite(first[key]).all()
        assert torch.equal(sent[key], before[key]), "the broadcast is not edited"
    assert torch.equal(batch.inputs, inputs), "the private batch is not edited"


@pytest.mark.integration
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("spec", SPECS)
def test_defense(spec: str, model: str, recipe: Recipe) -> None:
    if fits(spec, model):
        check(spec, model, recipe)
    else:
        with pytest.raises(GradveilError, match="batch"):
            check(spec, model, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("model", LARGE)
@pytest.mark.parametrize("spec", SPECS)
def test_defense_on_a_large_model(spec: str, model: str) -> None:
    if fits(spec, model):
        check(spec, model, RECIPES["FedSGD"])
    else:
        with pytest.raises(GradveilError, match="batch"):
            check(spec, model, RECIPES["FedSGD"])
