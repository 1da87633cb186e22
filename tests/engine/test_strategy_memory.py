"""Workers measure how to step problems side by side, and none forgets what another found out."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from gradveil.engine import strategy


def _remember(names: list[str]) -> None:
    for name in names:
        strategy._remember(name, strategy.Choice("loop", 1), ["loop"])


def test_what_processes_remember_at_the_same_time_is_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path))
    names = [[f"{worker}-{number}" for number in range(40)] for worker in range(3)]
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_remember, args=(own,)) for own in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(strategy._remembered()) == {name for own in names for name in own}
