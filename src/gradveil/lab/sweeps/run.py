"""A sweep: a study run into a folder, from wherever an earlier sweep left it, by processes on this machine.

Workers are given batches one by one, and end when the process that gives them does.
"""

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
from gradveil.core.errors import GradveilError
from gradveil.core.locks import claimed
from gradveil.core.plugins import Plugin, loaded
from gradveil.lab.sweeps.queue import Queue, queue_of
from gradveil.lab.sweeps.results import ResultFolder, Status
from gradveil.lab.sweeps.study import CaseBatch, Study, batches_of
from gradveil.lab.sweeps.work import Outcome, attempt

Start = Literal["fork", "spawn", "here"]
"""How a worker starts. A fork is there at once, but only safe from a process in which torch has not yet worked. A
spawned one imports. ``here`` starts none: cases run in this process, with whatever data sets it has registered."""

_GLANCE = 1.0
"""Seconds after which the status is reported again, though nothing happened."""
_PATIENCE = 10.0
"""Seconds to wait for another sweep: workers of one that was just killed need a moment to notice."""
_LEAST_SHARE = 0.0001
"""Of a GPU: Ray counts no finer."""


def run_study(
    study: Study,
    out: Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    gpus: float = 1.0,
    retry: bool = False,
    part: tuple[int, int] = (1, 1),
    start: Start = "spawn",
    report: Callable[[Status], None] = lambda _status: None,
) -> Status:
    """Run what of a study is not done yet: on so many processes here, or on the Ray cluster at an address.

    Args:
        study: the cases.
        out: the folder of the sweep.
        workers: how many processes; with ``ray``, the size of a cluster that is made for it.
        ray: the address of a Ray cluster, or ``local``.
        gpus: the share of one, or the number, that a case on a GPU takes of a Ray cluster.
        retry: run cases again that failed before.
        part: (k, n), the k-th of n parts.
        start: how processes are started; ``here``: none are, cases run in this one.
        report: called with the status whenever something changed, and at times.
    """
    if workers < 1 or not 1 <= part[0] <= part[1]:
        raise GradveilError("a sweep needs at least one worker, and a part K/N with K from 1 to N")
    if not (_LEAST_SHARE <= gpus <= 1 or (gpus > 1 and gpus % 1 == 0)):
        raise GradveilError(
            f"--gpus is a share of one GPU, from {_LEAST_SHARE:g} to 1, or a whole number; not {gpus:g}"
        )
    with claimed(out, patience=_PATIENCE) as lock:
        results = ResultFolder(out)
        results.save_study(study)
        queue = queue_of(study, results, retry=retry, part=part)
        shown: list[str] = []

        def changed() -> None:
            nonlocal shown
            running = sorted(queue.under_way())
            if shown != running:
                shown = running
                lock.say(running=running, workers=queue.workers)
            report(queue.status())

        if ray is not None:
            from gradveil.lab.sweeps.ray import run_on_ray

            run_on_ray(queue, address=ray, workers=workers, threads=study.threads, gpus=gpus, changed=changed)
        elif start == "here":
            while (batch := queue.take()) is not None:
                queue.finish(batch, attempt(batch, out, study.threads))
                changed()
        else:
            _run_locally(queue, workers=workers, threads=study.threads, start=start, changed=changed)
        results.clean(batches_of(study))
        return queue.status()


def _run_locally(queue: Queue, *, workers: int, threads: int, start: Start, changed: Callable[[], None]) -> None:
    """Run the queue on so many processes; ``changed`` is called whenever something did, and at times."""
    queue.workers = workers
    cards = torch.cuda.device_count() if start == "spawn" else 0
    every = [Worker(start, queue.results, threads, number % cards if cards else None) for number in range(workers)]
    try:
        while queue.open:
            for worker in every:
                if worker.batch is None and (batch := queue.take()) is not None:
                    worker.give(batch)
            changed()
            busy = {worker.pipe: worker for worker in every if worker.batch is not None}
            for pipe in wait(list(busy), timeout=_GLANCE):
                queue.finish(*busy[pipe].ended())  # type: ignore[index]
        changed()
    finally:
        for worker in every:
            worker.stop()


class Worker:
    """One process and the batch that it has. It is started with its first batch, and anew when it died."""

    def __init__(self, start: Start, results: ResultFolder, threads: int, card: int | None) -> None:
        self._context: BaseContext = multiprocessing.get_context(start)
        self._results, self._threads, self._card = results, threads, card
        self._process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection
        self.batch: CaseBatch | None = None

    def give(self, batch: CaseBatch) -> None:
        if self._process is None:
            self.pipe, other = self._context.Pipe()
            arguments = (other, self._results.folder, self._threads, self._card, loaded())
            self._process = self._context.Process(target=_serve, args=arguments)  # type: ignore[attr-defined]
            self._process.start()
            other.close()
        self.batch = batch
        with suppress(BrokenPipeError):  # it died while idle; that is noticed when it is asked how the batch ended
            self.pipe.send(batch)

    def ended(self) -> tuple[CaseBatch, Outcome]:
        """The batch, and how it ended: as the process reports or, if that died, how it died."""
        assert self.batch is not None
        assert self._process is not None
        batch, self.batch = self.batch, None
        try:
            return batch, self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code, self._process = self._process.exitcode or 0, None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        try:
            log = self._results.log(batch).read_text(errors="replace")
        except OSError:
            log = ""
        return batch, Outcome("died", f"the process that ran it {how}", log)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.pipe.close()


def _serve(pipe: Connection, out: Path, threads: int, card: int | None, plugins: tuple[Plugin, ...]) -> None:
    """What a worker does: batches, until there are no more or nobody is left to give any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that gives the batches decides when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if card is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(card)
    while True:
        try:
            batch: CaseBatch = pipe.recv()
        except EOFError:
            return
        pipe.send(_logged(batch, out, threads, plugins))


def _logged(batch: CaseBatch, out: Path, threads: int, plugins: tuple[Plugin, ...]) -> Outcome:
    """Run a batch, with all that is printed meanwhile, also by a crash, in the batch's log."""
    try:
        log = ResultFolder(out).log(batch)
        file = open_file(log, os.O_WRONLY | os.O_TRUNC)
    except OSError as error:
        return Outcome("no room", f"cannot write {log}: {error.strerror}")
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.enable(sys.__stderr__ or 2)
    return attempt(batch, out, threads, plugins)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
