"""One table over every registered attack and every family of models: it runs, repeats itself, and never gets worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, Attack, Budget
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch, Recipe
from gradveil.threat import Observation
from interrogation import interrogated

MODELS = ["lenet:init=wide", "convnet:width=4", "mlp", "vit:depth=1,dim=24", "resnet18", "vgg11"]
HEAVY = ("resnet18", "vgg11")
ONLY_FOR = {"analytic": ["mlp"], "trap": ["mlp"]}
SMALL = {"learned": "learned:pairs=400,keep=false"}
"""What stands for an attack that no budget makes shorter."""
CLOSED_FORM = ("analytic", "trap", "imprint")
TINY = Budget(2, 6)


def fits(name: str, model: str) -> bool:
    return model in ONLY_FOR.get(name, MODELS)


def seen_by(attack: Attack, batches: list[Batch], **settings: Any) -> list[Observation]:
    """What the attack gets to see: replies to its own broadcasts if it crafts them, else to the honest one."""
    if attack.crafts:
        return [interrogated(attack, batch, **settings) for batch in batches]
    return observed(batches, **settings)


def table() -> Iterator[ParameterSet]:
    """Every attack on every model, for one example and for two; the heavy ones are slow, but for one of them."""
    for name in ATTACKS:
        for model in MODELS:
            for size in (1, 2):
                heavy = model in HEAVY and fits(name, model) and (name, model, size) != ("ig", "resnet18", 1)
                yield pytest.param(name, model, size, marks=[pytest.mark.slow] if heavy else [])


@pytest.mark.integration
@pytest.mark.parametrize(("name", "model", "size"), list(table()))
def test_attack(name: str, model: str, size: int) -> None:
    heavy = model in HEAVY
    attack = ATTACKS.build(SMALL.get(name, name), Budget(1, 2) if heavy else TINY)
    batches = private_batches(1 if heavy else 2, size)
    seeds = list(range(len(batches)))
    threat = "H" if attack.crafts else "E"
    if not fits(name, model):
        with pytest.raises(GradveilError, match=name):
            attack(seen_by(attack, batches, model=model, threat=threat), seeds=seeds)
        return
    seen = seen_by(attack, batches, model=model, threat=threat)
    first, second = (attack(seen, seeds=seeds) for _ in range(2))
    for one, again in zip(first, second, strict=True):
        assert torch.equal(one.inputs, again.inputs), "the same seeds give the same pictures"
        assert one.objective == again.objective == min(one.objectives)
        assert one.inputs.shape == (size, 3, 32, 32)
        assert one.objective <= one.trace[0]
        assert one.strategy
        assert one.stopped in ("budget", "converged", "stuck")


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in CLOSED_FORM])
def test_train_mode_batch_norm_and_fedavg(name: str) -> None:
    attack, batches = ATTACKS.build(SMALL.get(name, name), TINY), private_batches(1, 2)
    recipe = Recipe(sends="delta", epochs=2, batch_size=1, lr=0.01, train_mode=False)
    threat = "H" if attack.crafts else "E"
    (found,) = attack(seen_by(attack, batches, model="lenet:init=wide", recipe=recipe, threat=threat), seeds=[0])
    assert found.objective <= found.trace[0]
    attack = ATTACKS.build(SMALL.get(name, name), Budget(1, 2))
    seen = seen_by(attack, batches, model="convnet:width=4", recipe=Recipe(train_mode=True), threat=threat)
    (found,) = attack(seen, seeds=[0])
    assert found.objective <= found.trace[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ig", "dlg"])
def test_resnet152(name: str) -> None:
    (found,) = ATTACKS.build(name, Budget(1, 2))(observed(private_batches(1), model="resnet152"), seeds=[0])
    assert found.objective <= found.trace[0]


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name in ATTACKS if "iterations" in ATTACKS.options(name)])
def test_a_seed_means_the_same_alone_and_in_company(name: str) -> None:
    """What an observation gets does not depend on which others are attacked beside it, up to rounding."""
    attack = ATTACKS.build(f"{name}:strategy=loop,iterations=1,restarts=2", Budget(1, 1))
    seen = observed(private_batches(3))
    together = attack(seen, seeds=[7, 8, 9])
    (alone,) = attack(seen[2:], seeds=[9])
    torch.testing.assert_close(together[2].inputs, alone.inputs)


@pytest.mark.integration
@pytest.mark.parametrize("name", list(ATTACKS))
def test_the_prior_alone_does_not_use_the_update(name: str) -> None:
    alone = ATTACKS.build(name, Budget(1, 5)).prior_only()
    if alone is None:
        pytest.skip(f"{name} has no search to run without the update")
    batches = private_batches(2)
    (one,) = alone(observed(batches[:1], threat="E"), seeds=[1])
    (other,) = alone(observed(batches[1:], threat="E"), seeds=[1])
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.labels, other.labels)
