"""Who attacks a guard by what layers remember, by copies and by what follows the noise."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from gradveil.client import Guard
from gradveil.core.errors import GradveilError
from gradveil.core.types import Params
from gradveil.defenses import DP, Chain, Defense, Soteria, Step, Transform

INPUTS, TARGETS = torch.arange(16.0).view(4, 4), torch.arange(4) % 3


class Scaled(nn.Module):
    """A layer with a number, and with what a pass does to it."""

    def __init__(self, during: Callable[[Scaled, Tensor], None] = lambda _layer, _x: None) -> None:
        super().__init__()
        self.linear, self.scale, self.during, self.inside = nn.Linear(4, 3), 1.0, during, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside:
            self.inside = True
            self.during(self, x)
            self.inside = False
        return self.linear(x * 0.1)  # type: ignore[no-any-return]


def guarded(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
) -> tuple[Guard, Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gradveil.protect(model, optimizer, loss, defense="dp:sigma=1")

    def step() -> None:
        optimizer.zero_grad()
        guard.loss(model(INPUTS), TARGETS).backward()
        optimizer.step()

    return guard, step


def scale_of_copy(guard: Guard) -> float:
    module = guard._mirror.function().module
    assert isinstance(module, Scaled)
    return module.scale


def nan(layer: Scaled, _x: Tensor) -> None:
    layer.scale = float("nan")


def calls_itself(layer: Scaled, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)
        layer.scale = float(x.max())
        layer(x)


def changes_mode(layer: Scaled, x: Tensor) -> None:
    layer.train(float(x.max()) < 10)


def adds_a_layer(layer: Scaled, x: Tensor) -> None:
    layer.added = nn.Identity()
    layer.added.scale = float(x.max())  # type: ignore[assignment]


def test_the_mode_that_a_pass_sets_never_reaches_the_copy() -> None:
    model = Scaled(changes_mode)
    guard, step = guarded(model)
    step()
    step()
    assert guard._mirror.function().module.training
    assert not model.training
    model.train()
    step()
    model.during = lambda _layer, _x: None
    model.train()
    step()
    assert guard._mirror.function().module.training
    model.eval()
    step()
    assert not guard._mirror.function().module.training, "the loop set it"


def test_other_defenses_see_the_model_in_the_mode_that_it_is_in() -> None:
    class Sees(Defense):
        def on_gradient(self, gradient: Params, step: Step) -> Params:
            seen.append(step.model.module.training)
            return gradient

    seen: list[bool] = []
    model = Scaled().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gradveil.protect(model, optimizer, F.cross_entropy, defense=Sees())
    for mode in (False, True, False):
        model.train(mode)
        optimizer.zero_grad()
        guard.loss(model(INPUTS), TARGETS).backward()
        optimizer.step()
    assert seen == [False, True, False]


@pytest.mark.parametrize("during", [nan, calls_itself, adds_a_layer])
def test_what_a_pass_sets_never_reaches_the_copy(during: Callable[[Scaled, Tensor], None]) -> None:
    guard, step = guarded(Scaled(during))
    for _ in range(3):
        step()
    assert scale_of_copy(guard) == 1.0


def test_what_a_pass_of_another_thread_sets_does_not_either() -> None:
    entered, go_on, was_set, end = (threading.Event() for _ in range(4))

    def during(layer: Scaled, x: Tensor) -> None:
        if threading.current_thread() is other:
            entered.set()
            assert go_on.wait(10)
            layer.scale = float(x.max())
            was_set.set()
            assert end.wait(10)
        elif not other.is_alive() and not entered.is_set():
            layer.inside = False
            other.start()
            assert entered.wait(10)

    model = Scaled(during)
    guard, step = guarded(model)
    other = threading.Thread(target=lambda: model(INPUTS))
    step()  # begins before the other pass, and ends before it
    go_on.set()
    assert was_set.wait(10)
    step()
    end.set()
    other.join()
    assert scale_of_copy(guard) == 1.0


def test_what_a_loss_sets_on_the_model_does_not_either() -> None:
    model = Scaled()

    class Holder:
        held = model

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        Holder.held.scale += 1.0
        return F.cross_entropy(outputs, targets)

    guard, step = guarded(model, loss)
    step()
    step()
    assert model.scale > 1
    assert scale_of_copy(guard) == 1.0


def test_what_a_loop_sets_reaches_it_even_after_a_pass_that_failed() -> None:
    model = Scaled()
    guard, step = guarded(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    step()
    model.scale = 3.0
    step()
    assert scale_of_copy(guard) == 3.0


def test_a_schedule_of_dropout_stays_off_in_the_copy() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 3), 0.1

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(F.dropout(x, self.dropout, self.training))  # type: ignore[no-any-return]

    model = Dropping()
    guard, step = guarded(model)
    for rate in (0.1, 0.2, 0.3):
        model.dropout = rate
        step()
    assert guard.log.ledger.steps == 3


def test_an_observation_counts_copies_of_an_example_each() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    images, labels = torch.rand(1, 3, 2, 2).repeat(4, 1, 1, 1), torch.zeros(4, dtype=torch.long)
    observed, stepped = (gradveil.Client(model, defense="dp:sigma=1") for _ in range(2))
    observed.observe(images, labels)
    stepped.step(images, labels)
    assert observed.log.ledger.state() == stepped.log.ledger.state() == [[1.0, 1.0, 16]]


def test_an_observation_holds_no_statistics_of_earlier_steps() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3))
    client = gradveil.Client(model, defense="noise:sigma=0.1")
    client.step(torch.rand(8, 3, 2, 2) + 5, torch.arange(8) % 3)
    seen = client.observe(torch.rand(2, 3, 2, 2), torch.arange(2))
    assert torch.equal(seen.module.get_buffer("0.running_mean"), torch.zeros(3))


class Peek(Transform):
    """Says that it needs the tensors alone, and looks at the examples."""

    def transform(self, tree: Params, *_: object) -> Params:
        return tree

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return {name: step.batch.inputs.sum().expand_as(tensor) for name, tensor in gradient.items()}


@pytest.mark.parametrize("links", [[Chain([DP()]), Soteria()], [DP(), Chain([Soteria()])], [DP(), Peek()]])
def test_nothing_that_sees_examples_follows_a_guarantee(links: list[object]) -> None:
    with pytest.raises(GradveilError, match="looks at the private examples again"):
        Chain(links)  # type: ignore[arg-type]


def test_a_frozen_parameter_that_trained_between_rounds_does_not_leave() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    guard, step = guarded(model)
    step()
    sent = guard.update()
    guard.new_round({name: model.get_parameter(name) for name in sent})  # which a server may leave out
    step()
    guard.update()
    with torch.no_grad():
        model[0].weight -= INPUTS.mean()
    with pytest.raises(GradveilError, match=r"'0\.weight' moved without the guard, and is not in the broadcast"):
        guard.new_round({name: model.get_parameter(name) for name in sent})
    guard.new_round(dict(model.named_parameters()))


@dataclass(frozen=True)
class Frozen:
    logits: Tensor


class Slots:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Computed:
    def __init__(self, logits: Tensor) -> None:
        self.inner = Slots(logits)

    @property
    def logits(self) -> Tensor:
        return self.inner.logits


@pytest.mark.parametrize("kind", [Frozen, Slots, Computed])
def test_objects_with_logits_hold_copies_back_and_serve_empty_batches(kind: type[Frozen | Slots | Computed]) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Frozen | Slots | Computed:
            return kind(self.linear(x))

    model = Returning()
    guard, step = guarded(model)
    step()
    assert guard.loss(model(INPUTS[:0]), TARGETS[:0]).item() == 0
    with pytest.raises(GradveilError, match="is a copy of a guarded one"):
        copy.deepcopy(model)(INPUTS).logits.sum().backward()
