"""Ways to hold ``protect`` wrong: each is refused in one line, or what leaves is defended all the same.

Every entry of the table trains a small model in a way that would let the bare gradient out. The checker looks at all
that left: the guard's update, state and gradient, and the model's parameters after every step that was not refused.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from gradveil.core.errors import GradveilError
from guarded import LR, NOISE, Left, Loop, Marked, Net
from misuses import arguments, copies, gradients, optimizers, parameters, rounds, surroundings  # noqa: F401
from misuses.table import TABLE, Misuse, move, verdict

CASES = [
    pytest.param(entry, under, id=f"{entry.name}-{under}".replace(" ", "_")) for entry in TABLE for under in entry.under
]


@pytest.mark.integration
@pytest.mark.parametrize(("entry", "under"), CASES)
def test_misuse(entry: Misuse, under: str) -> None:
    found, why = verdict(entry.hold, under)
    assert found == entry.must, f"{found}: {why}"


def test_no_entry_is_named_twice() -> None:
    names = [entry.name for entry in TABLE]
    assert len(names) == len(set(names)) >= 100


@pytest.mark.parametrize("under", ["marks", "noise"])
def test_the_checker_sees_a_bare_step(under: str) -> None:
    """Whatever the table says rests on this: a loop without a guard is silent, a guarded one is defended."""

    def unguarded(loop: Loop) -> None:
        loop.protect().close()
        F.cross_entropy(loop.model(loop.inputs), loop.targets).backward()
        loop.step()

    def guarded(loop: Loop) -> None:
        loop.protect()
        loop.train(2)

    assert verdict(unguarded, under)[0] == "silent"
    assert verdict(guarded, under) == ("defended", "")


def test_an_edit_of_one_entry_is_seen() -> None:
    def one_entry(loop: Loop) -> None:
        loop.protect()
        loop.train()
        loop.model.head.weight.data[0, 0] += 0.01
        loop.send(loop.model)

    assert verdict(one_entry, "marks")[0] == "silent", "the checker"
    loop = Loop(Marked())
    loop.protect()
    loop.train()
    loop.model.head.weight.data[0, 0] = torch.nextafter(loop.model.head.weight.data[0, 0], torch.tensor(9.0))
    with pytest.raises(GradveilError, match=r"head\.weight"):
        loop.guard.update()


# ------------------------------------------------------------------------------------------ documented: what is silent


def leaky_optimizer(loop: Loop) -> None:
    """An optimizer class whose own step() moves parameters with other data: what it does inside is its own."""
    bare = loop.bare()

    class Leaky(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
            move(loop.model, bare)

    loop.protect(optimizer=Leaky(loop.model.parameters(), lr=LR))
    loop.train()


def gradient_sent_too_early(loop: Loop) -> None:
    """p.grad is bare between backward and step: loops that send gradients call guard.gradient()."""
    loop.protect()
    loop.backward()
    early = {name: p.grad.clone() for name, p in loop.model.named_parameters() if p.grad is not None}
    loop.left.append(Left("p.grad before the step", early, loop.least / LR))
    loop.step()


@pytest.mark.parametrize("hold", [leaky_optimizer, gradient_sent_too_early])
@pytest.mark.parametrize("under", ["marks", "noise"])
def test_what_is_documented_as_silent_is_silent(hold: Callable[[Loop], None], under: str) -> None:
    """If one of these is refused one day, the documentation has to change with it."""
    found, why = verdict(hold, under)
    assert found == "silent", why


# ----------------------------------------------------------------------------------- what marks and noise do not show


def test_a_seed_is_no_argument() -> None:
    model = Net()
    with pytest.raises(TypeError, match="seed"):
        gradveil.protect(  # type: ignore[call-arg]
            model, torch.optim.SGD(model.parameters(), lr=LR), F.cross_entropy, defense="noise", seed=0
        )


EXAMPLE_WISE = ["dp:bound=1,sigma=0.5", "clip:bound=1,per=example"]


@pytest.mark.parametrize("defense", EXAMPLE_WISE)
def test_a_penalty_in_the_loss_is_not_dropped_in_silence(defense: str) -> None:
    """These defenses begin with the examples: a penalty on parameters would be lost."""
    loop = Loop(defense)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 10 * loop.model.head.weight.square().sum()

    loop.protect(loss=loss)
    with pytest.raises(GradveilError, match=r"penalty|parameters"):
        loop.train()


@pytest.mark.parametrize("defense", EXAMPLE_WISE)
def test_a_penalty_that_begins_later_is_not_dropped_in_silence(defense: str) -> None:
    """Penalties are often warmed up: the first step may well be free of them."""
    loop, strength = Loop(defense), [0.0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(outputs, targets)
        return total + strength[0] * loop.model.head.weight.square().sum() if strength[0] else total

    loop.protect(loss=loss)
    loop.train()
    strength[0] = 10.0
    with pytest.raises(GradveilError, match=r"penalty|parameters"):
        loop.train()


@pytest.mark.parametrize("defense", EXAMPLE_WISE)
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 25.0]))]
)
def test_a_loss_that_is_no_mean_over_the_examples_is_refused(defense: str, loss: nn.Module) -> None:
    """One example alone has another weight than in the batch: the sum's factor or the class weights would be lost."""
    loop = Loop(defense)
    loop.protect(loss=loss)
    with pytest.raises(GradveilError, match="mean"):
        loop.train()


@pytest.mark.parametrize("defense", EXAMPLE_WISE)
def test_a_loss_that_knows_the_whole_batch_is_refused(defense: str) -> None:
    """Weights for each example of a batch cannot be given to one example alone."""
    loop, weights = Loop(defense), torch.rand(8)
    loop.protect(loss=lambda outputs, targets: (weights * F.cross_entropy(outputs, targets, reduction="none")).mean())
    with pytest.raises(GradveilError):
        loop.train()


@pytest.mark.parametrize("defense", EXAMPLE_WISE)
def test_outputs_changed_in_place_are_not_dropped_in_silence(defense: str) -> None:
    """The defense computes the outputs of each example again, and would not change them."""
    loop = Loop(defense)
    loop.protect()

    def one_step() -> None:
        loop.guard.loss(loop.model(loop.inputs).mul_(5), loop.targets).backward()
        loop.optimizer.step()

    with pytest.raises(GradveilError):
        one_step()


def test_a_factor_on_the_loss_is_kept_by_a_defense_that_begins_with_the_examples() -> None:
    moved = []
    for factor in (1.0, 0.25):
        loop = Loop("clip:bound=0.1,per=example")
        loop.protect()
        (factor * loop.guard.loss(loop.model(loop.inputs), loop.targets)).backward()
        loop.optimizer.step()
        moved.append(loop.guard.update())
    for name, change in moved[0].items():
        torch.testing.assert_close(0.25 * change, moved[1][name], msg=name)


def test_asking_again_draws_no_new_noise() -> None:
    loop = Loop(NOISE)
    guard = loop.protect()
    loop.backward()
    first, second = guard.gradient(), guard.gradient()
    assert all(torch.equal(first[name], second[name]) for name in first)
    loop.optimizer.step()
    once, again, state = guard.update(), guard.update(), guard.state_dict()
    for name in once:
        assert torch.equal(once[name], again[name])
        torch.testing.assert_close(once[name], -LR * first[name])
        torch.testing.assert_close(state[name], loop.broadcast[name] + once[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd does not work in a fork of a process that saw a GPU")
def test_forked_processes_draw_noise_of_their_own() -> None:
    """Two children that share a stream send updates whose difference has no noise in it."""
    loop = Loop(NOISE)
    loop.protect()
    loop.train()
    updates = []
    for _ in range(2):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # a pool of threads does not survive a fork
                loop.train()
                os.write(writing, pickle.dumps({n: t.numpy() for n, t in loop.guard.update().items()}))
            except GradveilError as error:
                os.write(writing, pickle.dumps(str(error)))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            updates.append(pickle.loads(pipe.read()))
        os.waitpid(child, 0)
    if isinstance(updates[0], str):
        return  # refused
    loop.train()
    own = {name: tensor.numpy() for name, tensor in loop.guard.update().items()}
    for one, other in ((updates[0], updates[1]), (updates[0], own)):
        for name, tensor in one.items():
            assert abs(tensor - other[name]).max() > 1, f"{name} has the same noise in two processes"
