"""Doing a unit of work: its cases are run together in one folder, and then each gets a folder of its own."""

from __future__ import annotations

import errno
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gradveil.auditing import Case, ObservedCase, run_case, run_observed
from gradveil.core.errors import GradveilError
from gradveil.federated import run_training
from gradveil.studies.folders import part, tidy
from gradveil.studies.ledger import Ledger
from gradveil.studies.study import Entry
from gradveil.studies.units import Unit

_NOT_IN_RESULTS = frozenset({"seconds", "files", "trace", "assumptions"})
"""What differs from run to run, or is long and stands in audit.json anyway."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True)
class Outcome:
    """How a unit ended. ``died``: its process did; ``lost``: its machine did, for no fault of the unit."""

    how: Literal["done", "failed", "no room", "died", "lost"]
    reason: str = ""
    log: str = ""


def attempt(unit: Unit, out: Path, threads: int) -> Outcome:
    """Do a unit, and say how it ended; only what ends the process gets past here."""
    torch.set_num_threads(threads)
    try:
        _do(unit, Ledger(out))
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


def _do(unit: Unit, ledger: Ledger) -> None:
    folder, started = ledger.work(unit), time.perf_counter()
    whole = _run(unit, folder)
    seconds = (time.perf_counter() - started) / len(unit.entries)
    if unit.alone:
        tidy(folder)
        ledger.publish(unit.entries[0].digest, folder, _result(unit.entries[0], unit, whole), seconds)
        return
    for entry in unit.entries:
        if ledger.result(entry.digest) is None:
            assert isinstance(entry.case, Case), "nothing else has company"
            draft = ledger.draft(entry.digest)
            audit = part(entry.case, whole, folder, draft)
            ledger.publish(entry.digest, draft, _result(entry, unit, audit), seconds)
    ledger.abandon(unit)


def _run(unit: Unit, folder: Path) -> dict[str, Any]:
    """One audit of all defenses of the unit, or one training; what an interrupted attempt finished is kept."""
    case = unit.entries[0].case
    if isinstance(case, Case):
        defenses = dict.fromkeys(defense for entry in unit.entries for defense in entry.case.defenses)  # type: ignore[union-attr]
        return run_case(case.model_copy(update={"defenses": tuple(defenses)}), folder, resume=True).as_json()
    if isinstance(case, ObservedCase):
        return run_observed(case, folder, resume=True).as_json()
    return run_training(case, folder, resume=True)


def _result(entry: Entry, unit: Unit, done: dict[str, Any]) -> dict[str, Any]:
    """What is worth comparing: equal runs write equal bytes."""
    rows = [{key: value for key, value in row.items() if key not in _NOT_IN_RESULTS} for row in done["rows"]]
    return {
        "kind": entry.kind,
        "title": entry.title,
        "case": entry.case.as_json(),
        "environment": done["environment"],
        "together": unit.digests,
        "rows": rows,
        **({"verdicts": done["verdicts"]} if "verdicts" in done else {}),
    }
