"""Workers on this machine: processes that are given units one by one, and end when the one that gives them does."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Literal

import torch

from gradveil.core.atomic import open_file
from gradveil.studies.agenda import Agenda
from gradveil.studies.ledger import Ledger
from gradveil.studies.units import Unit
from gradveil.studies.work import Outcome, attempt

Start = Literal["fork", "spawn"]
"""A fork is there at once, but only safe from a process in which torch has not yet worked. A spawned one imports."""

_GLANCE = 1.0
"""Seconds after which the standing is told again, though nothing happened."""


def run_locally(
    agenda: Agenda, *, workers: int, threads: int, start: Start = "spawn", tell: Callable[[], None] = lambda: None
) -> None:
    """Run what is on the agenda on so many processes; ``tell`` is called whenever something changed, and at times."""
    agenda.workers = workers
    cards = torch.cuda.device_count() if start == "spawn" else 0
    crew = [Worker(start, agenda.ledger, threads, number % cards if cards else None) for number in range(workers)]
    try:
        while agenda.open:
            for worker in crew:
                if worker.unit is None and (unit := agenda.take()) is not None:
                    worker.give(unit)
            tell()
            busy = {worker.pipe: worker for worker in crew if worker.unit is not None}
            for pipe in wait(list(busy), timeout=_GLANCE):
                agenda.report(*busy[pipe].ended())  # type: ignore[index]
        tell()
    finally:
        for worker in crew:
            worker.stop()


class Worker:
    """One process and the unit that it has. It is started with its first unit, and anew when it died."""

    def __init__(self, start: Start, ledger: Ledger, threads: int, card: int | None) -> None:
        self._context: BaseContext = multiprocessing.get_context(start)
        self._ledger, self._threads, self._card = ledger, threads, card
        self._process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection
        self.unit: Unit | None = None

    def give(self, unit: Unit) -> None:
        if self._process is None:
            self.pipe, other = self._context.Pipe()
            arguments = (other, self._ledger.folder, self._threads, self._card)
            self._process = self._context.Process(target=_serve, args=arguments)  # type: ignore[attr-defined]
            self._process.start()
            other.close()
        self.unit = unit
        with suppress(BrokenPipeError):  # it died while idle; that is noticed when it is asked how the unit ended
            self.pipe.send(unit)

    def ended(self) -> tuple[Unit, Outcome]:
        """The unit, and how it ended: as the process says or, if that died, as its death says."""
        assert self.unit is not None
        unit, self.unit = self.unit, None
        try:
            return unit, self.pipe.recv()
        except (EOFError, ConnectionError):
            return unit, Outcome("died", self._last_words(), _text(self._ledger.log(unit)))

    def _last_words(self) -> str:
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        self._process = None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the process that ran it {how}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.pipe.close()


def _serve(pipe: Connection, out: Path, threads: int, card: int | None) -> None:
    """What a worker does: units, until there are no more or nobody is left to give any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who gives the units decides when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if card is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(card)
    while True:
        try:
            unit: Unit = pipe.recv()
        except EOFError:
            return
        pipe.send(_logged(unit, out, threads))


def _logged(unit: Unit, out: Path, threads: int) -> Outcome:
    """Do a unit, with all that is said meanwhile, also by a crash, in the unit's log."""
    try:
        log = Ledger(out).log(unit)
        file = open_file(log, os.O_WRONLY | os.O_TRUNC)
    except OSError as error:
        return Outcome("no room", f"cannot write {log}: {error.strerror}")
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(sys.__stderr__ or 2)
    return attempt(unit, out, threads)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
