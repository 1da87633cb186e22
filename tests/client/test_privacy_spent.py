"""What a guard says was spent: nothing that left is forgotten, and nothing gives privacy back."""

from __future__ import annotations

import io
import itertools
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradveil
from gradveil.core.errors import GradveilError
from gradveil.defenses.accounting import guarantee
from guarded import LR, Net, examples

DELTA = 1e-5
INPUTS, TARGETS = examples(n=20)
DATA = TensorDataset(INPUTS, TARGETS)


class Loop:
    def __init__(self, defense: str = "dp:sigma=2,bound=1") -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.guard = gradveil.protect(self.model, self.optimizer, F.cross_entropy, defense=defense)
        self.broadcast = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @property
    def spent(self) -> float:
        return self.guard.privacy_spent(DELTA)

    def backward(self, inputs: torch.Tensor = INPUTS, targets: torch.Tensor = TARGETS) -> None:
        self.optimizer.zero_grad()
        self.guard.loss(self.model(inputs), targets).backward()

    def step(self, inputs: torch.Tensor = INPUTS, targets: torch.Tensor = TARGETS) -> None:
        self.backward(inputs, targets)
        self.optimizer.step()


def test_nothing_is_spent_before_a_step() -> None:
    assert Loop().spent == 0


def test_every_step_is_counted() -> None:
    loop, spent = Loop(), [0.0]
    for _ in range(4):
        loop.step()
        spent.append(loop.spent)
    assert all(before < after < math.inf for before, after in itertools.pairwise(spent))


def test_a_gradient_that_was_given_is_counted_although_it_was_never_stepped() -> None:
    """Otherwise a loop could ask for one gradient again and again, and average the noise away for nothing."""
    loop, spent = Loop(), [0.0]
    for _ in range(4):
        loop.backward()
        first, again = loop.guard.gradient(), loop.guard.gradient()
        assert all(torch.equal(first[name], again[name]) for name in first)
        spent.append(loop.spent)
    assert all(before < after for before, after in itertools.pairwise(spent))


def test_a_gradient_that_is_given_and_stepped_is_counted_once() -> None:
    given, stepped = Loop(), Loop()
    given.backward()
    given.guard.gradient()
    given.optimizer.step()
    stepped.step()
    assert given.spent == stepped.spent


def test_rounds_add_up() -> None:
    loop, spent = Loop(), [0.0]
    for _ in range(3):
        loop.step()
        loop.guard.update()
        spent.append(loop.spent)
        loop.guard.new_round(loop.broadcast)
        assert loop.spent == spent[-1]
    assert all(before < after for before, after in itertools.pairwise(spent))


def test_going_back_gives_no_privacy_back() -> None:
    loop = Loop()
    loop.step()
    best = loop.guard.checkpoint()
    loop.step()
    spent = loop.spent
    loop.guard.restore(best)
    assert loop.spent == spent
    loop.step()
    assert loop.spent > spent


def test_a_restart_remembers_what_was_spent() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step()
    file = io.BytesIO()
    torch.save(loop.guard.checkpoint(), file)
    file.seek(0)
    again = Loop()
    again.guard.restore(torch.load(file, weights_only=True))
    assert again.spent == pytest.approx(loop.spent)
    again.step()
    loop.step()
    assert again.spent == pytest.approx(loop.spent)


def test_restoring_twice_counts_once() -> None:
    loop = Loop()
    loop.step()
    kept = loop.guard.checkpoint()
    again = Loop()
    for _ in range(2):
        again.guard.restore(kept)
    assert again.spent == pytest.approx(loop.spent)


def test_rounds_that_train_in_forks_add_up_in_the_process_that_restores_them(tmp_path: Path) -> None:
    loop, reference, file = Loop(), Loop(), tmp_path / "checkpoint.pt"
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)
                torch.set_num_threads(1)  # a pool of threads does not survive a fork
                loop.step()
                torch.save(loop.guard.checkpoint(), file)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        loop.guard.restore(torch.load(file, weights_only=True))
        file.unlink()
        loop.guard.new_round(loop.broadcast)
        reference.step()
        assert loop.spent == reference.spent > 0


def test_an_optimizer_made_anew_starts_no_new_account() -> None:
    loop = Loop()
    loop.step()
    spent = loop.spent
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR)
    loop.guard.use(loop.optimizer)
    assert loop.spent == spent


def test_sampled_steps_cost_less_than_whole_passes() -> None:
    sampled, whole = Loop(), Loop()
    for inputs, targets in sampled.guard.sample(DATA, 0.1, steps=5):
        sampled.step(inputs, targets)
        whole.step()
    assert 0 < sampled.spent < whole.spent / 2


def test_batches_that_a_loop_drew_itself_cost_as_much_as_whole_passes() -> None:
    own, whole = Loop(), Loop()
    for at in range(5):
        own.step(INPUTS[at : at + 2], TARGETS[at : at + 2])
        whole.step()
    assert own.spent == whole.spent


def test_more_examples_than_were_drawn_are_refused_or_counted_in_full() -> None:
    """A loop that draws a small batch and trains on everything has no claim to the price of the draw."""
    loop, whole = Loop(), Loop()

    def cheat() -> None:
        for _ in loop.guard.sample(DATA, 0.1, steps=1):
            loop.step(INPUTS, TARGETS)
            whole.step()

    try:
        cheat()
    except GradveilError:
        return
    assert loop.spent == whole.spent


def test_a_second_step_on_one_draw_is_refused_or_counted_in_full() -> None:
    loop, reference = Loop(), Loop()

    def cheat() -> None:
        for inputs, targets in loop.guard.sample(DATA, 0.5, steps=1):
            loop.step(inputs, targets)
            loop.step(inputs, targets)

    try:
        cheat()
    except GradveilError:
        return
    reference.step()
    assert loop.spent > reference.spent


def test_a_step_after_the_sampling_costs_as_much_as_a_whole_pass() -> None:
    loop, whole = Loop(), Loop()
    for inputs, targets in loop.guard.sample(DATA, 0.1, steps=1):
        loop.step(inputs, targets)
    loop.step()
    whole.step()
    assert loop.spent >= whole.spent


def test_empty_batches_send_noise_and_cost_a_step() -> None:
    loop = Loop()
    sizes = []
    for inputs, targets in loop.guard.sample(DATA, 0.001, steps=4):
        sizes.append(len(inputs))
        before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
        loop.step(inputs, targets)
        for name, p in loop.model.named_parameters():
            assert torch.isfinite(p).all()
            assert not torch.equal(p, before[name]), "whether a batch was empty must not show"
    assert 0 in sizes
    assert loop.guard.log.ledger.steps == 4


def test_more_steps_than_planned_are_refused() -> None:
    loop = Loop("dp:sigma=2,bound=1,steps=2")
    for _ in range(2):
        loop.step()
    loop.backward()
    before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    with pytest.raises(GradveilError, match="planned"):
        loop.optimizer.step()
    assert all(torch.equal(before[name], p) for name, p in loop.model.named_parameters())


def test_a_defense_without_a_proof_has_no_epsilon() -> None:
    loop = Loop("noise:sigma=100")
    assert loop.spent == 0
    loop.step()
    assert loop.spent == math.inf


@pytest.mark.parametrize("rate", [0.0, 1.5, -1.0, math.nan])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    loop = Loop()
    with pytest.raises(GradveilError, match="rate"):
        list(loop.guard.sample(DATA, rate))


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    loop = Loop()
    loop.step()
    with pytest.raises(GradveilError, match="delta"):
        loop.guard.privacy_spent(delta)


def test_a_later_checkpoint_of_an_earlier_process_is_counted_too() -> None:
    first = Loop()
    first.step()
    early = first.guard.checkpoint()
    for _ in range(4):
        first.step()
    late = first.guard.checkpoint()
    again = Loop()
    again.guard.restore(early)
    again.guard.restore(late)
    assert again.spent >= first.spent * (1 - 1e-9)


def test_a_factor_that_depends_on_the_examples_is_refused() -> None:
    """It multiplies the noise too, so the size of the noise would tell the loss. The guarantee does not cover that."""
    loop = Loop()

    def two_steps() -> None:
        for at in (0, 10):
            loop.optimizer.zero_grad()
            loss = loop.guard.loss(loop.model(INPUTS[at : at + 10]), TARGETS[at : at + 10])
            (loss**2).backward()
            loop.optimizer.step()

    with pytest.raises(GradveilError, match="factor"):
        two_steps()


def test_a_draw_that_was_not_stepped_is_refused_or_counted() -> None:
    """A loop that skips empty batches lets their absence show, which the accountant does not expect."""
    loop = Loop()

    def skipping() -> None:
        for inputs, targets in loop.guard.sample(DATA, 0.001, steps=6):
            if len(inputs):
                loop.step(inputs, targets)

    try:
        skipping()
    except GradveilError:
        return
    assert loop.guard.log.ledger.steps == 6


def test_going_back_does_not_make_a_defense_without_a_proof_private() -> None:
    loop = Loop("noise:sigma=0.001")
    start = loop.guard.checkpoint()
    loop.step(INPUTS[:10], TARGETS[:10])
    loop.guard.new_round(loop.model.state_dict())
    loop.guard.restore(start)
    assert loop.guard.privacy_spent(1e-5) == math.inf


@pytest.mark.integration
def test_a_hundred_steps_on_poisson_batches_cost_what_the_accountant_says_for_them() -> None:
    """Restarted from a checkpoint in the middle, the same."""
    expected = guarantee(sigma=2.0, sample_rate=0.1, steps=100, delta=DELTA).epsilon
    first = Loop()
    for batch in first.guard.sample(DATA, 0.1, steps=100):
        first.step(*batch)
    assert first.spent == expected
    before, after = Loop(), Loop()
    for batch in before.guard.sample(DATA, 0.1, steps=50):
        before.step(*batch)
    saved = io.BytesIO()
    torch.save(before.guard.checkpoint(), saved)
    after.guard.restore(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    for batch in after.guard.sample(DATA, 0.1, steps=50):
        after.step(*batch)
    assert after.spent == expected
