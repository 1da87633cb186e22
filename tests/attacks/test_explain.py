"""One local step tells its gradient, whatever the client sends of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.attacks.explain import as_gradient
from gradveil.core.types import Recipe

ONE_STEP = Recipe(sends="delta", lr=0.01, batch_size=4)


def test_a_difference_of_one_step_is_its_gradient() -> None:
    batches = private_batches(1, 2)
    (delta,), (gradient,) = observed(batches, recipe=ONE_STEP), observed(batches)
    seen = as_gradient(replace(delta, earlier=(delta,)))
    for one in (seen, seen.earlier[0]):
        assert one.kind == "gradient"
        for name, tensor in gradient.reply.items():
            torch.testing.assert_close(one.reply[name], tensor, rtol=1e-3, atol=1e-4 * float(tensor.abs().max()))


@pytest.mark.parametrize(
    "recipe",
    [
        replace(ONE_STEP, epochs=2),
        replace(ONE_STEP, batch_size=1),
        replace(ONE_STEP, weight_decay=0.1),
    ],
)
def test_more_than_a_gradient_stays_as_it_is(recipe: Recipe) -> None:
    (one,) = observed(private_batches(1, 2), recipe=recipe)
    assert as_gradient(one) is one


def test_nothing_is_turned_that_the_adversary_does_not_know() -> None:
    (one,) = observed(private_batches(1, 2), recipe=ONE_STEP)
    for blind in (replace(one, recipe=None), replace(one, batch_size=None)):
        assert as_gradient(blind) is blind


def test_attacks_find_the_same_behind_both_and_step_them_jointly() -> None:
    batches = private_batches(2)
    attack = ATTACKS.build("ig:iterations=30,restarts=1,strategy=joint", BUDGETS["quick"])
    by_delta, by_gradient = (attack(observed(batches, recipe=recipe), seeds=[0, 1]) for recipe in (ONE_STEP, Recipe()))
    for one, other in zip(by_delta, by_gradient, strict=True):
        assert one.objective == pytest.approx(other.objective, rel=0.05)
