"""What is still to do, what becomes of a batch that ended, and where the sweep stands."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gradveil.core.errors import GradveilError
from gradveil.core.locks import holder
from gradveil.lab.sweeps.results import ResultFolder, Status
from gradveil.lab.sweeps.study import CaseBatch, Study, batches_of
from gradveil.lab.sweeps.work import Outcome

TRIES = 2
"""A process may die for reasons of its own, such as memory that others took; twice, it is the case."""


@dataclass
class Queue:
    """The batches of a sweep between waiting, running and ended. A runner takes batches and reports how they ended."""

    results: ResultFolder
    titles: dict[str, str]
    """By digest, of all cases."""
    done: set[str]
    failed: dict[str, str]
    """By digest, why."""
    waiting: deque[CaseBatch]
    before: Sequence[float]
    """Seconds of the cases that were done before."""
    workers: int = 1
    running: dict[str, tuple[CaseBatch, float]] = field(default_factory=dict)
    """By digest of the batch, and since when."""
    _deaths: Counter[str] = field(default_factory=Counter)
    _seconds: list[float] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return bool(self.waiting or self.running)

    def take(self, *, gpu: bool = True) -> CaseBatch | None:
        """The next batch to run, if one waits; where there is no ``gpu`` for it, the next that needs none."""
        batch = next((one for one in self.waiting if gpu or not one.on_gpu), None)
        if batch is not None:
            self.waiting.remove(batch)
            self.running[batch.digest] = batch, time.monotonic()
        return batch

    def finish(self, batch: CaseBatch, outcome: Outcome) -> None:
        """A batch ended: it is done, waits again, is run case by case, or is given up."""
        _, began = self.running.pop(batch.digest)
        self._deaths[batch.digest] += outcome.how == "died"
        if outcome.how == "done":
            self._seconds += [(time.monotonic() - began) / len(batch.entries)] * len(batch.entries)
            self.done |= set(batch.digests)
        elif outcome.how == "lost" or (outcome.how == "died" and self._deaths[batch.digest] < TRIES):
            self.waiting.appendleft(batch)
        elif outcome.how == "no room" or batch.alone:
            for entry in (one for one in batch.entries if one.digest not in self.done):
                self.failed[entry.digest] = outcome.reason
                with suppress(GradveilError):  # where there is no room for the record either, the status has the reason
                    self.results.save_failure(entry, outcome.reason, outcome.log, alone=batch.alone)
        else:
            self.results.abandon(batch)
            self.done |= {digest for digest in batch.digests if self.results.result(digest) is not None}
            self.waiting.extendleft(one for one in reversed(batch.apart()) if not set(one.digests) <= self.done)

    def under_way(self) -> dict[str, float]:
        """By digest, since when each case runs."""
        return {
            digest: began
            for batch, began in self.running.values()
            for digest in batch.digests
            if digest not in self.done
        }

    def status(self) -> Status:
        now = time.monotonic()
        return Status.of(
            self.titles,
            done=self.done,
            running={digest: now - began for digest, began in self.under_way().items()},
            failed=self.failed,
            seconds=self._seconds or self.before,
            workers=self.workers,
        )


def queue_of(study: Study, results: ResultFolder, *, retry: bool = False, part: tuple[int, int] = (1, 1)) -> Queue:
    """What of a study is left to do here. ``part`` (k, n): every n-th batch from the k-th, for one of n machines."""
    batches = batches_of(study)[part[0] - 1 :: part[1]]
    titles = {entry.digest: entry.title for batch in batches for entry in batch.entries}
    done, failures, before = results.recorded(titles)
    failed = {} if retry else {digest: str(failure["reason"]) for digest, failure in failures.items()}
    waiting: deque[CaseBatch] = deque()
    for batch in batches:
        # Where a case failed by itself, its batch was taken apart before, and stays so.
        parted = any(failures.get(digest, {}).get("alone") for digest in batch.digests)
        parts = batch.apart() if parted else [batch]
        waiting.extend(one for one in parts if not set(one.digests) <= done | failed.keys())
    return Queue(results, titles, done, failed, waiting, before)


def status_of(folder: Path) -> Status:
    """The status of the study that was last run in a folder; running are the cases that a live sweep names."""
    results, sweep = ResultFolder(folder), holder(folder) or {}
    titles = results.titles()
    done, failures, seconds = results.recorded(titles)
    running = {digest: 0.0 for digest in sweep.get("running", []) if digest in titles and digest not in done}
    failed = {digest: str(failure["reason"]) for digest, failure in failures.items() if digest not in running}
    workers = int(sweep.get("workers", 1))
    return Status.of(titles, done=done, running=running, failed=failed, seconds=seconds, workers=workers)
