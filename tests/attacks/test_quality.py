"""What the attacks really recover, on shipped pictures."""

from __future__ import annotations

import pytest
import torch

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.problem import StatisticsRule, batch_norm_distance
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch, Recipe
from gradveil.metrics import matched, psnr


def quality(attack: str, batches: list[Batch], budget: Budget, *, prior: bool = False, **setting: object) -> float:
    """Mean PSNR over all pictures, each batch matched to its truth."""
    chosen = ATTACKS.build(attack, budget)
    alone = chosen.prior_only()
    if prior:
        assert alone is not None
        chosen = alone
    found = chosen(observed(batches, **setting), seeds=list(range(len(batches))))  # type: ignore[arg-type]
    pairs = zip(found, batches, strict=True)
    return float(
        torch.cat([psnr(matched(Batch(one.inputs, one.labels), b).inputs, b.inputs) for one, b in pairs]).mean()
    )


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(sends="delta", lr=0.01)], ids=["gradient", "delta"])
@pytest.mark.parametrize("model", ["mlp", "mlp:normalize=true", "imprint > lenet:init=wide"])
def test_the_analytic_readout_is_exact_for_one_example(model: str, recipe: Recipe) -> None:
    assert quality("analytic", private_batches(8), Budget(1, 1), model=model, recipe=recipe) > 60


def test_the_analytic_readout_needs_a_linear_first_layer() -> None:
    with pytest.raises(GradveilError, match="'analytic' reads a fully connected first layer"):
        quality("analytic", private_batches(1), Budget(1, 1), model="lenet")


FEDAVG = {
    "E=1, n=2, B=1": (2, Recipe(sends="delta", epochs=1, batch_size=1, lr=0.01)),
    "E=2, n=4, B=2": (4, Recipe(sends="delta", epochs=2, batch_size=2, lr=0.01)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEDAVG)
def test_fedavg_is_inverted_by_simulating_it(name: str) -> None:
    """Matching the simulated local run beats the prior alone; taking the update for one gradient does not come near."""
    size, recipe = FEDAVG[name]
    batches, budget = private_batches(1, size), Budget(2, 2500)
    simulated = quality("ig:tv=0.004", batches, budget, recipe=recipe)
    averaged = quality("ig:tv=0.004,match=averaged", batches, budget, recipe=recipe)
    prior = quality("ig:tv=0.004", batches, budget, prior=True, recipe=recipe)
    print(f"{name}: simulated {simulated:.1f} dB, averaged {averaged:.1f} dB, prior alone {prior:.1f} dB")
    assert simulated > averaged
    assert simulated > prior + 2


def test_simulating_needs_the_recipe() -> None:
    batches = private_batches(1, 2)
    with pytest.raises(GradveilError, match="match=averaged"):
        quality("ig", batches, Budget(1, 1), threat="B", recipe=Recipe(sends="delta", epochs=2))


@pytest.mark.integration
def test_batch_norm_statistics_count_only_where_they_are_given() -> None:
    (blind,) = observed(private_batches(1, 2), model="resnet18", threat="D")
    (informed,) = observed(private_batches(1, 2), model="resnet18", threat="E")
    assert blind.statistics is None
    assert informed.statistics is not None
    attack = ATTACKS.build("gi", Budget(1, 1))
    (_, _, without), (_, _, given) = (attack.problems([one], [0]) for one in (blind, informed))  # type: ignore[attr-defined]
    assert "statistics" not in without
    assert given["statistics"].keys() == informed.statistics.keys()


@pytest.mark.parametrize("rule", ["squared", "norm"])
@pytest.mark.parametrize("train_mode", [False, True])
def test_the_statistics_are_those_of_the_clients_own_pass(train_mode: bool, rule: StatisticsRule) -> None:
    batches = private_batches(1, 2)
    recipe = Recipe(train_mode=train_mode)
    (one,) = observed(batches, model="resnet18", threat="E", recipe=recipe)
    assert one.statistics is not None
    away = batch_norm_distance(one, 1.0, rule)
    assert float(away(batches[0].inputs, one.statistics)) < 1e-3
    assert float(away(batches[0].inputs.flip(-1) * 0.5, one.statistics)) > 0.01
    (other,) = observed(batches, model="resnet18", threat="E", recipe=Recipe(train_mode=not train_mode))
    assert float(away(batches[0].inputs, other.statistics or {})) > 0.01


@pytest.mark.slow
def test_restarts_that_are_pulled_together_still_find_the_picture() -> None:
    """A pull that outweighs the matching averages four unrelated pictures instead: 12 dB, as without the update."""
    batches, budget = private_batches(4), Budget(4, 800)
    alone, together = (quality(f"gi:consensus={weight}", batches, budget) for weight in (0.0, 0.01))
    print(f"alone {alone:.1f} dB, pulled together {together:.1f} dB")
    assert together > alone - 1
    assert together > 14
