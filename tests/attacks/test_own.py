"""Attacks as objects: shipped ones by their class, and one of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

import gradveil as gv
from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, BUDGETS, Attack, Budget, InvertingGradients, Reconstruction
from gradveil.attacks.parts.matching import Matching, Phase, over_pixels
from gradveil.attacks.parts.objectives import Squared
from gradveil.attacks.parts.search import Adam
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.threat import Observation


@dataclass(frozen=True, kw_only=True)
class Plain(Attack):
    """One color everywhere."""

    color: float = 0.5
    label: Literal["first", "last"] = "first"

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        del seeds, progress
        found = []
        for one in seen:
            labels = torch.tensor([0 if self.label == "first" else one.domain.classes - 1])
            inputs = torch.full((1, *one.domain.shape), self.color)
            found.append(Reconstruction.closed_form(inputs, labels, 1.0))
        return found


@dataclass(frozen=True, kw_only=True)
class Unsigned(Matching):
    """A search of one's own, which inherits the options that all of them have."""

    lr: float = 0.1
    title = "unsigned"
    objective = Squared()

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(search=Adam(iterations=self.steps, lr=self.lr), prior=over_pixels()),)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ATTACKS, "_factories", dict(ATTACKS._factories))
    ATTACKS.register("plain")(Plain)
    ATTACKS.register("unsigned")(Unsigned)


def test_one_observation_gives_one_reconstruction() -> None:
    seen = observed(private_batches(2))
    attack = gv.attacks.InvertingGradients(iterations=3, restarts=1, strategy="loop")
    alone, both = attack(seen[0]), attack(seen)
    assert isinstance(alone, Reconstruction)
    assert torch.equal(alone.inputs, both[0].inputs), "seeds are 0, 1 and so on"
    assert torch.equal(both[1].inputs, attack([seen[1]], seeds=[1])[0].inputs)
    assert alone.problem_steps == 3


def test_a_spec_and_an_object_are_the_same_attack() -> None:
    built = ATTACKS.build("ig:iterations=8,lr=0.2,match=averaged,strategy=vmap")
    assert built == InvertingGradients(iterations=8, lr=0.2, match="averaged", strategy="vmap")
    assert built.problems_each == BUDGETS["standard"].restarts
    assert ATTACKS.build("ig", Budget(3, 5)) == InvertingGradients(Budget(3, 5))
    assert ATTACKS.build("ig:restarts=4", Budget(3, 5)).problems_each == 4


@pytest.mark.usefixtures("registered")
def test_a_class_of_ones_own_registers_as_the_shipped_ones_do() -> None:
    (seen,) = observed(private_batches(1))
    assert ATTACKS.summary("plain") == "One color everywhere."
    found = ATTACKS.build("plain:color=0.25,label=last", Budget(1, 1))(seen)
    assert float(found.inputs.max()) == 0.25
    assert found.labels.tolist() == [9]
    assert (found.objective, found.objectives, found.trace, found.strategy) == (1.0, (1.0,), (1.0,), "closed form")
    with pytest.raises(GradveilError, match=r"'plain' has no option 'colour'; its options: color=0.5, label=first"):
        ATTACKS.build("plain:colour=1")
    with pytest.raises(GradveilError, match="label is one of first, last, not 'middle'"):
        ATTACKS.build("plain:label=middle")


@pytest.mark.usefixtures("registered")
def test_a_search_of_ones_own_has_the_options_of_all_searches() -> None:
    seen = observed(private_batches(2))
    attack = ATTACKS.build("unsigned:lr=0.05,strategy=loop", Budget(2, 4))
    for one in attack(seen):
        assert one.objective == min(one.objectives) < one.trace[0]
        assert one.problem_steps == 8
    alone = attack.prior_only()
    assert alone is not None
    assert torch.equal(alone(seen[0]).inputs, alone(replace(seen[1]), seeds=[0]).inputs)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ig:restarts=-1", "at least one restart"),
        ("ig:iterations=-1", "at least one iteration"),
        ("gifd:lr=0", "a learning rate above 0"),
        ("dlg:history=0", "one step of history"),
        ("sme:match=averaged", "'sme' has no option 'match'"),
        ("ggl:population=1", "a population of two"),
    ],
)
def test_what_no_search_can_do_is_refused_when_it_is_built(spec: str, words: str) -> None:
    with pytest.raises(GradveilError, match=words):
        ATTACKS.build(spec)
