"""A reply that is the same whatever the examples are tells nothing; what only seems so is found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

import pytest
import torch

import gradveil
import naive
from gradveil import models
from gradveil.attacks.identify import Identify
from gradveil.auditing.verdict import NO_COUNTER_MOVE
from gradveil.client import SimulatedClient, rounds_to_audit, sends_constant
from gradveil.core.streams import Stream
from gradveil.core.types import Params, Recipe
from gradveil.data import ImageSet, load
from gradveil.defenses import Defense, Log, Noise, Step
from gradveil.threat import Observation

DATA = load("mnist-samples")
MODULE = models.build("mlp:hidden=16,depth=1", DATA.domain, seed=0)
SENT = models.trained_parameters(MODULE)
BATCHES = [DATA.batch([place]) for place in range(40)]


def nothing(gradient: Params) -> Params:
    return {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}


class Zeros(Defense):
    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        return nothing(gradient)


class Weights(Defense):
    """Sends the broadcast back."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return {name: 0.1 * step.params[name] for name in gradient}


class LongWarmUp(Defense):
    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return gradient if step.round_number > 5000 else nothing(gradient)


class Counting(Defense):
    """A warm-up that it counts itself."""

    def __init__(self) -> None:
        self.answered = 0

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        self.answered += 1
        return gradient if self.answered > 5000 else nothing(gradient)


@dataclass
class Keeping(Defense):
    kept: list[Params] = field(default_factory=list)

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        return nothing(gradient)


class DropsLarge(Defense):
    """Sends nothing where the gradient is large, as those of an untrained model are."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        length = sum(float(tensor.square().sum()) for tensor in gradient.values())
        return gradient if length < 1e-2 else nothing(gradient)


class DropsSmall(Defense):
    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        length = sum(float(tensor.square().sum()) for tensor in gradient.values())
        return gradient if length > 1e4 else nothing(gradient)


class OneLabel(Defense):
    """Sends the examples of one class, and nothing of all others."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return gradient if int(step.batch.labels[0]) == 7 else nothing(gradient)


class Seldom(Defense):
    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return gradient if float(step.rng.uniform((1,), next(iter(gradient.values())))) < 0.01 else nothing(gradient)


class LastBit(Defense):
    """Says one bit."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        bit = float(step.batch.inputs.mean() > 0.15)
        return {name: torch.full_like(tensor, 1e-30 * bit) for name, tensor in gradient.items()}


class SignsOfZeros(Defense):
    """Zeros, some of them negative: they are equal to all others, and show the picture in black and white."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        dark, sent = step.batch.inputs[0].flatten() > 0.5, nothing(gradient)
        first = next(iter(sent.values())).view(-1)
        first[: len(dark)] = torch.where(dark, -0.0, 0.0)
        return sent


class OrderOfNames(Defense):
    """Zeros, in one of 24 orders of their names."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        orders = list(permutations(gradient))
        names = orders[int(step.batch.inputs.sum()) % len(orders)]
        return {name: torch.zeros_like(gradient[name]) for name in names}


class Precision(Defense):
    """Zeros of bright pictures in double precision."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        kind = torch.float64 if float(step.batch.inputs.mean()) > 0.13 else torch.float32
        return {name: torch.zeros_like(tensor, dtype=kind) for name, tensor in gradient.items()}


class EverySeventh(Defense):
    """The rounds of an audit are all of them others."""

    every: int = 7
    after: int = 0

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return gradient if step.round_number % self.every == self.after else nothing(gradient)


class InThirteen(EverySeventh):
    every, after = 13, 5


class InFederations(Defense):
    """Quiet in a simulation, where nobody counts the rounds of a federation."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return nothing(gradient) if step.federation_round is None else gradient


class WhenGrown(Defense):
    """Quiet while weights are small, as those of an untrained model are."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return gradient if max(float(p.abs().max()) for p in step.params.values()) > 1 else nothing(gradient)


class WhenRight(Defense):
    """Quiet until the model is sure and right."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        chances = step.model({**step.frozen, **step.params}, step.batch.inputs).softmax(dim=1)
        return gradient if float(chances[0, step.batch.labels[0]]) > 0.9 else nothing(gradient)


class CountingTogether(Defense):
    """A warm-up that all instances count, in a list that they share by mistake."""

    answered: list[int] = []  # noqa: RUF012

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        self.answered.append(step.round_number)
        return gradient if len(self.answered) > 10**6 else nothing(gradient)


class CountingByClass(Defense):
    answered = 0

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        type(self).answered += 1
        return gradient if self.answered > 10**6 else nothing(gradient)


class Raises(Defense):
    def on_gradient(self, gradient: Params, step: Step) -> Params:
        if step.round_number > 1:
            raise gradveil.errors.GradveilError("no")
        return nothing(gradient)


@pytest.mark.parametrize(
    ("defense", "constant"),
    [
        (Zeros(), True),
        (Weights(), True),
        *((each, False) for each in (Defense(), Noise(sigma=1.0), LongWarmUp(), Counting(), Keeping(), DropsLarge())),
        *((each, False) for each in (DropsSmall(), OneLabel(), Seldom(), LastBit(), Raises(), naive.WarmUp())),
        *((each, False) for each in (SignsOfZeros(), OrderOfNames(), Precision(), EverySeventh(), InThirteen())),
        *((each, False) for each in (InFederations(), WhenGrown(), WhenRight(), CountingTogether(), CountingByClass())),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Defense) else "",
)
def test_only_what_depends_on_nothing_is_constant(defense: Defense, constant: bool) -> None:
    client = SimulatedClient(MODULE, recipe=Recipe(), defense=defense)
    assert sends_constant(client, SENT, BATCHES) is constant
    assert not sends_constant(client, SENT, [])


@dataclass(frozen=True, kw_only=True)
class Guess(Identify):
    """Cannot tell any candidates apart."""

    def scores(self, seen: Sequence[Observation], known: ImageSet, *_: object) -> torch.Tensor:
        return torch.zeros(len(seen), len(known))


@pytest.mark.parametrize(("images", "grade"), [(32, "A"), (13, "B"), (6, "C")])
def test_zeros_get_the_grade_that_the_number_of_images_allows(images: int, grade: str) -> None:
    found = gradveil.audit(MODULE, DATA.batch(range(images)), defense=Zeros(), attack=Guess(), threat="D")
    (verdict,) = (one for one in found.verdicts if one.defense != "none")
    assert (verdict.grade, verdict.above_chance) == (grade, False)
    assert NO_COUNTER_MOVE not in verdict.flags
    assert verdict.ceiling is not None
    assert verdict.ceiling.constant
    assert verdict.ceiling.recognised is None, "nothing is promised of other models"


@pytest.mark.parametrize("threat", ["D+labels", "G"])
def test_what_is_told_beside_the_reply_is_no_proof(threat: str) -> None:
    found = gradveil.audit(MODULE, DATA.batch(range(4)), defense=Zeros(), attack=Identify(), threat=threat)
    (verdict,) = (one for one in found.verdicts if one.defense != "none")
    assert NO_COUNTER_MOVE in verdict.flags


@pytest.mark.parametrize("defense", [LongWarmUp(), SignsOfZeros(), InThirteen()], ids=lambda each: type(each).__name__)
def test_what_only_seems_constant_earns_nothing(defense: Defense) -> None:
    found = gradveil.audit(MODULE, DATA.batch(range(32)), defense=defense, attack=Guess(), threat="D")
    (verdict,) = (one for one in found.verdicts if one.defense != "none")
    assert NO_COUNTER_MOVE in verdict.flags
    assert verdict.grade == "C"


def test_what_comes_every_so_many_rounds_is_looked_at() -> None:
    client = SimulatedClient(MODULE, recipe=Recipe(), defense=Periodic())
    assert rounds_to_audit(client, SENT, BATCHES[0]) == (1, 720720)


@dataclass(frozen=True)
class Periodic(Defense):
    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return gradient if step.round_number % 7 == 0 else nothing(gradient)


class Adds(Defense):
    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return {**update, "more": torch.ones(3)}


class Drops(Defense):
    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return dict(list(update.items())[:1])


class Counts(Defense):
    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return {name: (100 * tensor).int() for name, tensor in update.items()}


class Several(Defense):
    batches_clients = True

    def on_gradients(self, gradients: Sequence[Params], steps: Sequence[Step]) -> list[Params]:  # noqa: ARG002
        return [{**gradient, "more": torch.ones(3)} for gradient in gradients]


@pytest.mark.parametrize("defense", [Adds(), Drops(), Counts(), Several()], ids=lambda each: type(each).__name__)
def test_an_update_of_other_tensors_is_refused(defense: Defense) -> None:
    """Not met as a traceback of whatever attack comes first."""
    with pytest.raises(gradveil.errors.GradveilError, match="the defense"):
        SimulatedClient(MODULE, recipe=Recipe(), defense=defense).replies(SENT, BATCHES[:1], [Stream.seeded(0)])
