"""Gradients of single examples: how often the model is copied for them, and that two threads do not meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradveil.core.streams import Stream
from gradveil.core.trees import norm, subtract
from gradveil.core.types import Batch, Params
from gradveil.defenses import DEFENSES, Step, clip
from gradveil.engine import SeparateNetwork, cached, example_gradients, example_pass, why_not_shared
from steps import step_of, step_on


class Copies(list[int]):
    """Notes each time that the model which holds it is copied."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Copies:
        self.append(1)
        return self


class Large(nn.Sequential):
    """Large enough to share its weights."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1024, 1100), nn.ReLU(), nn.Linear(1100, 10))
        self.copies = Copies()


def large_step(module: nn.Module, examples: int = 6) -> Step:
    rng = torch.Generator().manual_seed(0)
    _, step = step_of(module, Batch(torch.rand(examples, 1024, generator=rng), torch.arange(examples)))
    return step


def copies_in(module: Large, work: Callable[[], object]) -> int:
    module.copies.clear()
    work()
    return len(module.copies)


def test_a_pass_through_a_large_model_copies_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may remember examples, so each pass has a copy; the check is made once, and the rest needs none."""
    torch.manual_seed(0)
    module = Large()
    step = large_step(module)
    assert not why_not_shared(step)
    monkeypatch.setattr(clip, "EXAMPLES_AT_ONCE", 2)
    assert copies_in(module, lambda: why_not_shared(step)) == 0
    assert copies_in(module, lambda: example_gradients(step, step.batch)) == 1
    assert copies_in(module, lambda: clip.clipped_mean(step, 1.0)) == 3


def test_a_copy_holds_none_of_the_parameters() -> None:
    """A model may edit its weights in a pass."""

    class Editing(Large):
        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = super().forward(x)
            with torch.no_grad():
                self[0].weight.mul_(0.5)
            return outputs

    module = Editing()
    sent = {name: parameter.detach() for name, parameter in module.named_parameters()}
    before = {name: tensor.clone() for name, tensor in sent.items()}
    network = SeparateNetwork(module, sent, train_mode=None)
    network.differentiate(nn.functional.cross_entropy, torch.rand(2, 1, 1024), torch.zeros(2, 1, dtype=torch.long))
    assert all(torch.equal(tensor, before[name]) for name, tensor in sent.items())


def test_a_model_that_takes_another_way_than_when_it_was_checked_goes_by_vmap() -> None:
    """Here it uses a layer a second time once a switch is thrown."""

    class Switched(Large):
        twice = False

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = super().forward(x)
            return outputs + super().forward(x.flip(-1)) if self.twice else outputs

    torch.manual_seed(0)
    step = large_step(Switched())
    assert example_pass(step, step.batch) is not None
    step.model.module.twice = True  # type: ignore[assignment]
    assert not why_not_shared(step)
    assert example_pass(step, step.batch) is None
    found, right = example_gradients(step, step.batch), step.example_gradients()
    assert float(norm(subtract(found, right))) <= 1e-4 * float(norm(right))
    mean = clip.clipped_mean(step, 1e-3)
    assert float(norm(mean)) <= 1.001e-3


@pytest.mark.parametrize("spec", ["outpost", "soteria:probes=8", "graddefense:images=8,probes=1", "censor:trials=2"])
def test_two_threads_with_one_defense_send_what_each_sends_alone(spec: str) -> None:
    defense = DEFENSES.build(spec)
    steps = [step_on("lenet", examples=2 + thread)[1] for thread in range(2)]

    def sent(step: Step) -> Params:
        fresh = replace(step, rng=Stream.seeded(0, "defense"))
        return defense.for_round(fresh).on_gradient(step.gradient(), fresh)

    alone, start = [sent(step) for step in steps], threading.Barrier(2)
    together: list[list[Params]] = [[], []]

    def run(thread: int) -> None:
        start.wait()
        together[thread] += [sent(steps[thread]) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found, expected in zip(together, alone, strict=True):
        assert len(found) == 3
        for one in found:
            assert all(torch.equal(tensor, expected[name]) for name, tensor in one.items())


def test_each_thread_keeps_its_own() -> None:
    module, made = nn.Linear(1, 1), []

    def ask() -> None:
        made.append(cached(module, "key", object))

    for _ in range(2):
        ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()
    assert made[0] is made[2]
    assert made[0] is not made[1]
