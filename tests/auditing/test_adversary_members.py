"""A test for members that alarms for strangers beside them finds nobody at 1% false alarms."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradveil.attacks import Reconstruction
from gradveil.auditing.audit import Membership
from gradveil.auditing.scoring import membership

UPDATES, LIST, SIZE = 10, 100, 4


def asked(*tables: torch.Tensor) -> Membership:
    """Of scores [updates, candidates] for the list with the members, the first four of each update, and without."""
    one = Reconstruction.closed_form(torch.zeros(SIZE, 1), torch.zeros(SIZE, dtype=torch.int64), 0.0)
    found, without = ([replace(one, scores=row) for row in table] for table in tables)
    return membership(found, without, torch.arange(SIZE).repeat(UPDATES))


def noise(seed: int) -> torch.Tensor:
    return torch.rand(UPDATES, LIST, generator=torch.Generator().manual_seed(seed)).double()


def test_strangers_in_the_best_set_are_false_alarms() -> None:
    """The set that explains an update best: two of its members, and twenty strangers who fit by chance."""
    held = 10 + noise(0)
    held[:, :2] = 1.0
    held[:, 10:30] = 1.0
    found = asked(held, 10 + noise(1))
    assert found.found == 0.0
    assert found.interval is not None
    assert found.interval[0] == 0.0
    assert found.advantage is not None
    assert found.advantage < 0.4, "half of the members are alarmed for, and a fifth of the strangers"


def test_members_that_stand_alone_are_found_as_before() -> None:
    held = 10 + noise(0)
    held[:, :SIZE] = 1.0
    found = asked(held, 10 + noise(1))
    assert found.found == 1.0
    assert (found.advantage or 0.0) > 0.95


def test_updates_that_say_nothing_find_one_in_a_hundred() -> None:
    shares = [asked(noise(2 * seed), noise(2 * seed + 1)).found or 0.0 for seed in range(40)]
    assert sum(shares) / len(shares) < 0.015
