"""``gradveil.Client``, which owns its model: how it trains, and ways to hold it wrong."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gradveil
from gradveil.core.errors import GradveilError
from guarded import LR, NOISE, SIGMA, Marked, Net, examples

INPUTS, TARGETS = examples()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def client(model: Net | None = None, **changed: Any) -> tuple[gradveil.Client, dict[str, Tensor]]:
    """A client under ``Marked``, and a broadcast for it."""
    torch.manual_seed(0)
    model = model or Net()
    options = {"loss": F.cross_entropy, "defense": Marked(), "optimizer": sgd, **changed}
    return gradveil.Client(model, **options), copy.deepcopy(model.state_dict())


def assert_marked(reply: dict[str, Tensor], steps: int = 1) -> None:
    for name, change in reply.items():
        torch.testing.assert_close(change, torch.full_like(change, -LR * steps), msg=name)


def test_a_client_trains_and_replies() -> None:
    one, broadcast = client()
    one.start(broadcast)
    before = one.outputs(INPUTS)
    losses = [one.step(INPUTS, TARGETS) for _ in range(2)]
    assert losses[0] == pytest.approx(F.cross_entropy(before, TARGETS).item())
    assert not torch.equal(before, one.outputs(INPUTS))
    assert_marked(one.reply(), 2)
    assert_marked(one.reply(), 2)


def test_rounds_follow_each_other() -> None:
    one, broadcast = client()
    for _ in range(3):
        one.start(broadcast)
        one.step(INPUTS, TARGETS)
        assert_marked(one.reply())
        broadcast = {name: tensor + 1 for name, tensor in broadcast.items()}


def test_a_defense_of_the_update_works_here() -> None:
    one, broadcast = client(defense=f"{NOISE},at=update")
    one.start(broadcast)
    one.step(INPUTS, TARGETS)
    reply = one.reply()
    assert all(change.abs().max() > 1e-3 * SIGMA for change in reply.values())
    again = one.reply()
    assert all(torch.equal(reply[name], again[name]) for name in reply), "a second draw would halve the noise"


def test_going_back_gives_no_second_draw_for_one_reply() -> None:
    """Several replies with noise of their own around one change would let the noise be averaged away."""
    one, broadcast = client(defense=f"{NOISE},at=update")
    one.start(broadcast)
    one.step(INPUTS, TARGETS)
    before = one.checkpoint()
    first = one.reply()
    try:
        one.restore(before)
        second = one.reply()
    except GradveilError:
        return
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_outputs_are_of_the_model_as_it_is_now() -> None:
    one, broadcast = client()
    one.start(broadcast)
    one.step(INPUTS, TARGETS)
    moved = Net()
    moved.load_state_dict({name: tensor - LR for name, tensor in broadcast.items()})
    outputs = one.outputs(INPUTS)
    torch.testing.assert_close(outputs, moved(INPUTS).detach())
    assert not outputs.requires_grad


def test_the_model_that_was_given_is_not_the_one_that_trains() -> None:
    """Whoever holds the model can neither see the training nor change it."""
    torch.manual_seed(0)
    model = Net()
    one, broadcast = client(model)
    one.start(broadcast)
    one.step(INPUTS, TARGETS)
    assert all(torch.equal(tensor, broadcast[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.rand_like(p))
    assert_marked(one.reply())


def test_an_edited_reply_is_not_asked_for_again() -> None:
    one, broadcast = client()
    one.start(broadcast)
    one.step(INPUTS, TARGETS)
    for tensor in one.reply().values():
        tensor.add_(torch.rand_like(tensor))
    assert_marked(one.reply())


def test_a_broadcast_edited_after_the_start_changes_nothing() -> None:
    one, broadcast = client()
    one.start(broadcast)
    for tensor in broadcast.values():
        tensor.add_(1)
    one.step(INPUTS, TARGETS)
    assert_marked(one.reply())


def test_a_client_steps_under_no_grad() -> None:
    one, broadcast = client()
    one.start(broadcast)
    with torch.no_grad():
        one.step(INPUTS, TARGETS)
    assert_marked(one.reply())


def started(one: gradveil.Client, broadcast: dict[str, Tensor]) -> gradveil.Client:
    one.start(broadcast)
    one.step(INPUTS, TARGETS)
    return one


def replied(one: gradveil.Client, broadcast: dict[str, Tensor]) -> gradveil.Client:
    started(one, broadcast).reply()
    return one


WRONG: dict[str, Callable[[], Any]] = {
    "a reply before any step": lambda: _start_only().reply(),
    "a reply before the start": lambda: client()[0].reply(),
    "a step after the reply": lambda: replied(*client()).step(INPUTS, TARGETS),
    "a broadcast that lacks a parameter": lambda: client()[0].start({"head.bias": torch.zeros(3)}),
    "a broadcast with NaN": lambda: client()[0].start(
        {name: tensor * float("nan") for name, tensor in client()[1].items()}
    ),
    "a broadcast that is a list": lambda: client()[0].start(list(client()[1].values())),  # type: ignore[arg-type]
    "inputs and targets of two lengths": lambda: started(*client(loss=lambda o, _t: o.square().mean())).step(
        INPUTS, TARGETS[:3]
    ),
    "an optimizer where a function is due": lambda: client(optimizer=sgd(Net().parameters())),
    "a function that returns no optimizer": lambda: client(optimizer=list),
    "an optimizer of other parameters": lambda: client(optimizer=lambda _: sgd(Net().parameters())),
    "an optimizer that needs a closure": lambda: started(*client(optimizer=torch.optim.LBFGS)),
    "an unknown defense": lambda: client(defense="nois"),
    "no defense": lambda: client(defense=None),
    "a loss that is no function": lambda: client(loss="cross_entropy"),
    "a model that is no module": lambda: gradveil.Client(
        F.relu,  # type: ignore[arg-type]
        loss=F.cross_entropy,
        defense="noise",
        optimizer=sgd,
    ),
    "a pickled client": lambda: pickle.dumps(client()[0]),
    "a copied client": lambda: copy.deepcopy(client()[0]),
}


def _start_only() -> gradveil.Client:
    one, broadcast = client()
    one.start(broadcast)
    return one


@pytest.mark.parametrize("wrong", [pytest.param(call, id=name.replace(" ", "_")) for name, call in WRONG.items()])
def test_misuse_is_refused_in_one_line(wrong: Callable[[], Any]) -> None:
    with pytest.raises(GradveilError) as raised:
        wrong()
    assert re.fullmatch(r"[^\n]{20,400}", str(raised.value))


def test_a_seed_is_no_argument() -> None:
    with pytest.raises(TypeError, match="seed"):
        client(seed=0)
