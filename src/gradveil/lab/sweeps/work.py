"""Running one batch of cases: together in one folder, from which each case then gets a folder of its own."""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gradveil.auditing import Case, ObservedCase, run_case, run_observed
from gradveil.core.errors import GradveilError
from gradveil.core.plugins import Plugin
from gradveil.core.types import Json
from gradveil.federated import run_training
from gradveil.lab.audits import result_of, split_audit
from gradveil.lab.sweeps.results import LOG, ResultFolder
from gradveil.lab.sweeps.study import CaseBatch, StudyEntry

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True)
class Outcome:
    """How a batch ended. ``died``: its process did; ``lost``: its machine did, for no fault of the batch."""

    how: Literal["done", "failed", "no room", "died", "lost"]
    reason: str = ""
    log: str = ""


def attempt(batch: CaseBatch, out: Path, threads: int, plugins: Iterable[Plugin] = ()) -> Outcome:
    """Run a batch, and return how it ended; only what ends the process gets past here.

    ``plugins`` is the code that the process which gives the batch has loaded.
    """
    torch.set_num_threads(threads)
    try:
        for plugin in plugins:
            plugin.load()
        _run_and_publish(batch, ResultFolder(out))
    except Exception as error:
        reason = str(error) if isinstance(error, GradveilError) else f"{type(error).__name__}: {error}"
        how: Literal["failed", "no room"] = "no room" if _no_room(error) else "failed"
        return Outcome(how, " ".join(reason.split()), traceback.format_exc())
    return Outcome("done")


def _no_room(error: BaseException | None) -> bool:
    """Whether a full disk is behind it."""
    if error is None:
        return False
    return (isinstance(error, OSError) and error.errno in _NO_ROOM) or _no_room(error.__cause__ or error.__context__)


def _run_and_publish(batch: CaseBatch, results: ResultFolder) -> None:
    folder, started = results.work(batch), time.perf_counter()
    case, whole = batch.entries[0].case, None
    if isinstance(case, Case):  # one audit of all defenses; what an interrupted attempt finished is kept
        defenses = dict.fromkeys(defense for entry in batch.entries for defense in entry.case.defenses)  # type: ignore[union-attr]
        whole = run_case(case.model_copy(update={"defenses": tuple(defenses)}), folder, resume=True)
        done = whole.as_json()
    elif isinstance(case, ObservedCase):
        done = run_observed(case, folder, resume=True).as_json()
    else:
        done = dict(run_training(case, folder, resume=True))
    seconds = (time.perf_counter() - started) / len(batch.entries)

    def publish(entry: StudyEntry, place: Path, done: Json) -> None:
        about = {"kind": entry.kind, "title": entry.title, "case": entry.case.as_json()}
        about |= {"environment": done["environment"], "together": batch.digests}
        results.publish(entry.digest, place, about | result_of(done), seconds)

    if batch.alone:
        for path in [folder / LOG, *folder.rglob(".*")]:  # the log, and what a killed process had begun to write
            path.unlink(missing_ok=True)
        publish(batch.entries[0], folder, done)
        return
    for entry in batch.entries:
        if results.result(entry.digest) is None:
            assert isinstance(entry.case, Case), "nothing else shares a batch"
            assert whole is not None
            draft = results.draft(entry.digest)
            publish(entry, draft, split_audit(entry.case, whole, folder, draft).as_json())
    results.abandon(batch)
