"""The same on a Ray cluster. Nothing but messages joins the machines: results travel back as the bytes of their files.

A batch whose process dies is tried as often as on this machine; one whose machine dies goes to another.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from gradveil.core.atomic import write_atomically
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.plugins import Plugin, loaded
from gradveil.core.types import Json
from gradveil.lab.sweeps.queue import Queue
from gradveil.lab.sweeps.results import RESULT, ResultFolder
from gradveil.lab.sweeps.study import CaseBatch
from gradveil.lab.sweeps.work import Outcome, attempt

CaseFiles = dict[str, dict[str, bytes]]
"""By digest of a case, its files by their path in its folder."""

LOCAL = "local"
"""The address that stands for a cluster of this machine's own, for as long as the sweep runs."""
_GLANCE = 1.0
_PATIENCE = 5.0


def run_on_ray(
    queue: Queue, *, address: str, workers: int, threads: int, gpus: float, changed: Callable[[], None]
) -> None:
    """Run the queue on a cluster; ``workers`` is the size of one that is made for it."""
    ray = _connected(address, workers * threads)
    # What Ray prints of processes that died is in the records; here it would stand in the middle of the output.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), ExitStack() as ending:
        ending.callback(ray.shutdown)
        for share in {gpus if batch.on_gpu else 0.0 for batch in queue.waiting}:
            if not _slots(ray, threads, share):
                graphics = f" and {share:g} GPU" if share else ""
                raise GradveilError(f"no machine of the cluster has the {threads} CPU{graphics} that a case takes")
        remote = ray.remote(max_retries=0)(_run_remotely)
        under_way: dict[Any, CaseBatch] = {}
        while queue.open:
            most, most_on_gpu = (max(1, _slots(ray, threads, share)) for share in (0.0, gpus))
            while len(under_way) < most:
                on_gpu = sum(batch.on_gpu for batch in under_way.values())
                if (batch := queue.take(gpu=on_gpu < most_on_gpu)) is None:
                    break
                task = remote.options(num_cpus=threads, num_gpus=gpus if batch.on_gpu else 0)
                under_way[task.remote(batch, threads, loaded())] = batch
            queue.workers = max(1, len(under_way))
            changed()
            ended, _ = ray.wait(list(under_way), timeout=_GLANCE)
            for ticket in ended:
                queue.finish(under_way.pop(ticket), _received(ray, ticket, queue.results))
        changed()


def _run_remotely(batch: CaseBatch, threads: int, plugins: tuple[Plugin, ...]) -> tuple[Outcome, CaseFiles]:
    """Run a batch on the machine that the cluster chose, and return the files that came of it."""
    with tempfile.TemporaryDirectory(prefix="gradveil-") as out:
        outcome, files = attempt(batch, Path(out), threads, plugins), CaseFiles()
        for digest in batch.digests:
            folder = ResultFolder(Path(out)).case(digest)
            paths = [path for path in folder.rglob("*") if path.is_file()]
            files[digest] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return outcome, files


def _received(ray: ModuleType, ticket: Any, results: ResultFolder) -> Outcome:
    """How a batch ended; the files of each case that is done are on this disk by then."""
    outcome: Outcome
    files: CaseFiles
    try:
        outcome, files = ray.get(ticket)
    except ray.exceptions.RayTaskError as error:
        return Outcome("failed", " ".join(str(error.cause).split()), str(error))
    except (ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError) as error:
        return Outcome("lost", _first_line(error))
    except ray.exceptions.RayError as error:
        return Outcome("died", _first_line(error), str(error))
    try:
        for digest, by_name in files.items():
            if RESULT in by_name and results.result(digest) is None:
                draft = results.draft(digest)
                for name, content in by_name.items():
                    write_atomically(draft / name, content)
                results.place(digest, draft)
    except (GradveilError, OSError) as error:
        return Outcome("no room", str(error))
    return outcome


def _connected(address: str, cpus: int) -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray will by itself: here it only warns
    own: Json = {}
    if address == LOCAL:
        # Ray listens on every network of the machine, but does nothing for who does not know the token.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        own = {"num_cpus": cpus, "include_dashboard": False}
    try:
        import ray
    except ImportError:
        raise NotAvailableError("--ray needs Ray: pip install 'gradveil[ray]'") from None
    host, _, port = address.rpartition(":")
    if "/" not in address and port.isdecimal():  # Ray itself would ask for minutes before it says that nobody is there
        try:
            socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
        except (OSError, OverflowError) as error:
            hint = "start one with ray start --head"
            raise GradveilError(f"no Ray cluster answers at {address} ({error}): {hint}") from None
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise GradveilError(f"no Ray cluster at {address}: {reason}") from None
    return ray


def _slots(ray: ModuleType, threads: int, share: float) -> int:
    """How many batches that take this share of a GPU, or none, the machines that are alive can run at once."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    by_cpu = [int(machine.get("CPU", 0) // threads) for machine in alive]
    by_gpu = [_shares(int(machine.get("GPU", 0)), share) for machine in alive] if share else by_cpu
    return sum(map(min, by_cpu, by_gpu))


def _shares(cards: int, share: float) -> int:
    """How many such shares a machine has. What is less than a card is never of two.

    >>> _shares(2, 0.25), _shares(2, 0.6), _shares(5, 2)
    (8, 2, 2)
    """
    return cards * int(1 / share) if share < 1 else int(cards // share)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
