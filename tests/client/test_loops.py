"""Legitimate loops under ``protect``: no false alarm, and without a defense not one parameter differs.

Every entry of the table runs three times: without a guard, under the defense ``none``, and under ``noise``. The first
two must end with equal parameters, buffers and figures. A guard that drew from torch's global generator, or that ran
the model once more, would show here.
"""

from __future__ import annotations

import pytest
import torch

from loops import habits, models, optimizers, rounds  # noqa: F401
from loops.table import TABLE, Entry, Run

CASES = [
    pytest.param(entry, id=entry.name.replace(" ", "_"), marks=[pytest.mark.slow] if entry.slow else [])
    for entry in TABLE
]


def ran(entry: Entry, defense: str | None) -> Run:
    torch.manual_seed(0)
    run = Run(defense)
    entry.loop(run)
    return run


@pytest.mark.parametrize("entry", CASES)
def test_a_guard_without_a_defense_changes_nothing(entry: Entry) -> None:
    plain, guarded = ran(entry, None), ran(entry, "none")
    torch.testing.assert_close(guarded.model.state_dict(), plain.model.state_dict(), rtol=1e-5, atol=1e-6)
    assert guarded.figures == pytest.approx(plain.figures, rel=1e-4, abs=1e-6)
    if guarded.guard is None:
        return  # closed on the way, or inside a Client
    update, state = guarded.guard.update(), guarded.guard.state_dict()
    assert update.keys() >= {name for name, parameter in plain.model.named_parameters() if parameter.requires_grad}
    for name, parameter in plain.model.named_parameters():
        change = update.get(name, torch.zeros_like(parameter))  # frozen ones are not sent
        torch.testing.assert_close(change, parameter.detach() - plain.broadcast[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    assert state.keys() == plain.model.state_dict().keys(), "a server could not load it"


@pytest.mark.parametrize("entry", CASES)
def test_a_loop_trains_under_noise(entry: Entry) -> None:
    plain, noisy = ran(entry, None), ran(entry, "noise:sigma=0.05")
    before = plain.model.state_dict()
    after = noisy.model.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in before), "the noise moved nothing"
    if noisy.guard is not None:
        update = noisy.guard.update()
        assert any(change.any() for change in update.values())
        for name, parameter in noisy.model.named_parameters():
            change = update.get(name, torch.zeros_like(parameter))
            torch.testing.assert_close(change, parameter.detach() - noisy.broadcast[name], rtol=1e-4, atol=1e-5)


def test_no_entry_is_named_twice() -> None:
    names = [entry.name for entry in TABLE]
    assert len(names) == len(set(names)) >= 100
