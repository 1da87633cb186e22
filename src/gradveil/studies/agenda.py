"""What is still to do, what becomes of a unit that ended, and where the sweep stands."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gradveil.core.errors import GradveilError
from gradveil.studies.ledger import Ledger
from gradveil.studies.study import Study
from gradveil.studies.units import Unit, units_of
from gradveil.studies.work import Outcome

TRIES = 2
"""A process may die for reasons of its own, such as memory that others took; twice, it is the case."""


@dataclass(frozen=True)
class Standing:
    """Where a sweep stands; cases are counted."""

    total: int
    done: int
    running: dict[str, float]
    """By title of the case, since how many seconds."""
    failed: dict[str, str]
    """By title of the case, why."""
    left: int
    """Neither done, nor running, nor failed."""
    seconds_per_case: float | None
    workers: int

    @property
    def estimate(self) -> float | None:
        """Seconds until all is done, if the rest takes as long as what is done did."""
        if self.seconds_per_case is None:
            return None
        begun = sum(min(seconds, self.seconds_per_case) for seconds in self.running.values())
        return max(0.0, self.seconds_per_case * (self.left + len(self.running)) - begun) / max(1, self.workers)

    def as_json(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "done": self.done,
            "running": sorted(self.running),
            "failed": self.failed,
            "left": self.left,
            "seconds_per_case": self.seconds_per_case,
            "estimate_s": self.estimate,
        }


@dataclass
class Agenda:
    """The units of a sweep between waiting, running and ended. Whoever runs them asks and reports here."""

    ledger: Ledger
    total: int
    done: set[str]
    failed: dict[str, str]
    """By digest, why."""
    titles: dict[str, str]
    waiting: deque[Unit]
    before: float | None
    """Mean seconds of the cases that were done before."""
    workers: int = 1
    running: dict[str, tuple[Unit, float]] = field(default_factory=dict)
    _deaths: Counter[str] = field(default_factory=Counter)
    _seconds: list[float] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return bool(self.waiting or self.running)

    def take(self, *, gpu: bool = True) -> Unit | None:
        """The next unit to run, if one waits; where there is no ``gpu`` for it, the next that needs none."""
        unit = next((one for one in self.waiting if gpu or not one.on_gpu), None)
        if unit is not None:
            self.waiting.remove(unit)
            self.running[unit.digest] = unit, time.monotonic()
        return unit

    def report(self, unit: Unit, outcome: Outcome) -> None:
        """How a unit ended, and so what is next: nothing, the same again, its cases apart, or it is given up."""
        _, began = self.running.pop(unit.digest)
        self._deaths[unit.digest] += outcome.how == "died"
        if outcome.how == "done":
            self._seconds += [(time.monotonic() - began) / len(unit.entries)] * len(unit.entries)
            self.done |= set(unit.digests)
        elif outcome.how == "lost" or (outcome.how == "died" and self._deaths[unit.digest] < TRIES):
            self.waiting.appendleft(unit)
        elif outcome.how == "no room" or unit.alone:
            self._give_up(unit, outcome)
        else:
            self.ledger.abandon(unit)
            self.done |= {digest for digest in unit.digests if self.ledger.result(digest) is not None}
            self.waiting.extendleft(one for one in reversed(unit.apart()) if not set(one.digests) <= self.done)

    def _give_up(self, unit: Unit, outcome: Outcome) -> None:
        for entry in unit.entries:
            if entry.digest not in self.done:
                self.failed[entry.digest] = outcome.reason
                try:
                    self.ledger.save_failure(entry, outcome.reason, outcome.log, alone=unit.alone)
                except GradveilError:
                    continue  # where there is no room for the record either, it is told when the sweep ends

    def standing(self) -> Standing:
        now = time.monotonic()
        running = {
            entry.title: now - began
            for unit, began in self.running.values()
            for entry in unit.entries
            if entry.digest not in self.done
        }
        return Standing(
            total=self.total,
            done=len(self.done),
            running=running,
            failed={self.titles[digest]: reason for digest, reason in self.failed.items()},
            left=self.total - len(self.done) - len(running) - len(self.failed),
            seconds_per_case=fmean(self._seconds) if self._seconds else self.before,
            workers=self.workers,
        )


def agenda_of(study: Study, ledger: Ledger, *, retry: bool = False, part: tuple[int, int] = (1, 1)) -> Agenda:
    """What of a study is left to do here. ``part`` (k, n): every n-th unit from the k-th, for one of n machines."""
    units = units_of(study)[part[0] - 1 :: part[1]]
    digests = [digest for unit in units for digest in unit.digests]
    done = {digest for digest in digests if ledger.result(digest) is not None}
    recorded = {digest: failure for digest in digests if digest not in done and (failure := ledger.failure(digest))}
    failed = {} if retry else {digest: str(failure["reason"]) for digest, failure in recorded.items()}
    waiting: deque[Unit] = deque()
    for unit in units:
        # Where a case failed by itself, its company was parted before, and stays so.
        parted = any(recorded.get(digest, {}).get("alone") for digest in unit.digests)
        parts = unit.apart() if parted else [unit]
        waiting.extend(one for one in parts if not set(one.digests) <= done | failed.keys())
    titles = {entry.digest: entry.title for entry in study.entries}
    took = [seconds for digest in done if (seconds := ledger.seconds(digest)) is not None]
    return Agenda(ledger, len(digests), done, failed, titles, waiting, fmean(took) if took else None)
