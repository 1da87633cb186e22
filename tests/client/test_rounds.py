"""Defenses with a schedule or a memory are looked at in later rounds, and what they remember stays with one client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import naive
from gradveil import models
from gradveil.attacks import Attack, Reconstruction
from gradveil.auditing.sources import own
from gradveil.client import SimulatedClient, replies_in_round, rounds_to_audit
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Params, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, Censor, Defense, Noise, Step, can_remember, fresh

DATA = load("mnist-samples")
MODULE = models.build("lenet", DATA.domain, seed=0)
SENT = models.trained_parameters(MODULE)


def client(defense: Defense) -> SimulatedClient:
    return SimulatedClient(MODULE, recipe=Recipe(), defense=defense)


@dataclass(kw_only=True, eq=False)
class Remembers(Defense):
    """Keeps every gradient that it sees."""

    kept: list[Params] = field(default_factory=list)

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        self.kept.append(gradient)
        return {name: torch.zeros_like(tensor) + len(self.kept) for name, tensor in gradient.items()}


@pytest.mark.parametrize(
    ("defense", "rounds"),
    [
        (Defense(), (1,)),
        (Noise(sigma=0.1), (1,)),
        (Censor(trials=1, rounds=30), (1, 31)),
        (DEFENSES.build("clip:bound=1+censor:trials=1,rounds=4"), (1, 5)),
        (naive.WarmUp(), (1, 2)),
        (naive.GuessableNoise(), (1, 2, 3, 10)),
        (naive.TopWithFeedback(), (1, 2, 3, 10)),
        (naive.Quantised(stochastic=True), (1,)),
    ],
)
def test_rounds_in_which_a_defense_does_something_else_are_found(defense: Defense, rounds: tuple[int, ...]) -> None:
    assert rounds_to_audit(client(defense), SENT, DATA.batch([0])) == rounds


def test_a_memory_is_of_one_client_and_of_all_its_rounds() -> None:
    batches, streams = [DATA.batch([place]) for place in range(3)], [lambda _: Stream.seeded(0)] * 3
    found = replies_in_round(client(Remembers()), SENT, batches, streams, 4)
    assert {float(tensor.max()) for reply in found for tensor in reply.update.values()} == {4.0}


def test_error_feedback_remembers() -> None:
    defense = DEFENSES.build("topk")
    assert can_remember(defense)
    assert fresh(defense) is not defense


@pytest.mark.parametrize("name", sorted(set(DEFENSES) - {"topk"}))
def test_no_other_defense_of_ours_can_remember(name: str) -> None:
    required = {"noise": "sigma=0.1", "clip": "bound=1", "sparsify": "keep=0.1"}
    try:
        defense = DEFENSES.build(f"{name}:{required[name]}" if name in required else name)
    except GradveilError:
        pytest.skip("it has an option that has to be given")
    assert not can_remember(defense)
    assert fresh(defense) is defense


class Looks(Attack):
    """Looks into the defense that it is given."""

    def run(self, seen: Any, *, seeds: Any, progress: Any) -> list[Reconstruction]:
        raise NotImplementedError


def test_what_a_defense_keeps_of_private_examples_reaches_no_attack() -> None:
    defense, batch = Remembers(), DATA.batch(range(4))
    plan = own(MODULE, batch, defenses=[defense], attacks=[Looks()], threat="D", gallery=DATA)
    rounds = [cell.origin.round for cell in plan.cells]
    assert rounds == [1, 2, 3, 10]
    for cell in plan.cells:
        for one in cell.exchange().observations:
            assert isinstance(one.built_defense, Remembers)
            assert one.built_defense is not defense
            assert one.built_defense.kept == []
            assert one.round_number == cell.origin.round
            assert float(next(iter(one.reply.values())).max()) == cell.origin.round
    assert defense.kept == [], "and what belongs to the caller stays as it was"
