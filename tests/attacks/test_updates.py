"""One local step tells its gradient, whatever the client sends of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, BUDGETS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.parts.updates import as_gradient, explained
from gradveil.core.errors import GradveilError
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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_small_steps_average_to_the_gradient_at_the_broadcast(momentum: float) -> None:
    batches = private_batches(1, 2)
    several = Recipe(sends="delta", epochs=10, lr=1e-4, momentum=momentum)
    (delta,), (gradient,) = observed(batches, recipe=several), observed(batches)
    mean = explained(delta, "averaged").reply
    for name, tensor in gradient.reply.items():
        assert (mean[name] - tensor).norm() < 0.05 * tensor.norm()


@pytest.mark.parametrize("recipe", [Recipe(), ONE_STEP, replace(ONE_STEP, weight_decay=0.1)])
def test_a_surrogate_of_one_step_is_that_step(recipe: Recipe) -> None:
    """Nothing lies between the broadcast and the point where its gradient was taken."""
    seen = observed(private_batches(1, 2), recipe=recipe)
    (found,), (plain,) = (
        ATTACKS.build(f"{name}:strategy=loop", Budget(1, 5))(seen, seeds=[0]) for name in ("sme", "ig")
    )
    assert torch.equal(found.inputs, plain.inputs)
    assert found.objective == plain.objective


def test_a_surrogate_of_several_steps_is_searched_along_them() -> None:
    attack = ATTACKS.build("sme", Budget(1, 1))
    assert isinstance(attack, Matching)
    several = observed(private_batches(1, 2), recipe=replace(ONE_STEP, epochs=2))
    assert "mix" in attack.problems(several, [0])[1]
    assert "mix" not in attack.problems(observed(private_batches(1, 2)), [0])[1]


def test_the_point_of_a_surrogate_stays_between_the_ends() -> None:
    attack = ATTACKS.build("sme:mix_lr=2", Budget(1, 1))
    assert isinstance(attack, Matching)
    problems = attack.prepare(observed(private_batches(1, 2), recipe=replace(ONE_STEP, epochs=2)), [0])
    for mix in (-0.2, 0.3, 1.7):
        held = problems.project({**problems.start, "mix": torch.tensor([mix])})["mix"]
        assert held.tolist() == pytest.approx([min(max(mix, 0), 1)])


@pytest.mark.parametrize("name", ["dlg", "idlg"])
def test_lbfgs_searches_along_the_steps_too(name: str) -> None:
    seen = observed(private_batches(1, 2), recipe=replace(ONE_STEP, epochs=2))
    (found,) = ATTACKS.build(f"{name}:match=surrogate", Budget(1, 3))(seen, seeds=[0])
    assert found.objective <= found.trace[0]


def test_the_cosine_of_csdlg_does_not_see_how_long_an_update_is() -> None:
    (seen,) = observed(private_batches(1), threat="C+labels")
    longer = replace(seen, reply={name: 3 * tensor for name, tensor in seen.reply.items()})

    def traces(attack: str) -> list[tuple[float, ...]]:
        return [ATTACKS.build(attack, Budget(1, 12))([one], seeds=[0])[0].trace for one in (seen, longer)]

    cosines, squares = traces("idlg:distance=cosine"), traces("idlg")
    assert cosines[0] == pytest.approx(cosines[1], rel=1e-3)
    assert cosines[0][-1] < cosines[0][0]
    assert squares[0][0] != pytest.approx(squares[1][0], rel=1e-2)


def test_more_examples_than_rows_cannot_be_read_off_them() -> None:
    attack, batches = ATTACKS.build("analytic", Budget(1, 1)), private_batches(1, 6)
    with pytest.raises(GradveilError, match="which has 4 for a batch of 6"):
        attack(observed(batches, model="mlp:hidden=4"), seeds=[0])
