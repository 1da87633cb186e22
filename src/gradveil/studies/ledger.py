"""The folder of a sweep. A case is done when its ``result.json`` is there; its folder is put into place as a whole.

::

    study.json                 the cases, for --status
    DIGEST/                    the folder of an audit or a training, with these beside:
      result.json              case, metrics and versions, nothing that differs from run to run: the case is done
      ran.json                 seconds, and where
      failed.json, log.txt     or: why it is not, and all that was said
    .work/UNIT/                what is under way, or was when the sweep ended
    .lock                      held while a sweep runs here; says which

Folders named by a digest can be copied here from another machine: that is how results are merged.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradveil.core.atomic import make_folder, remove_partial, write_atomically, write_json
from gradveil.core.errors import BadFileError
from gradveil.core.reading import read_text
from gradveil.studies.study import Entry, Study
from gradveil.studies.units import Unit

VERSION = 1
RESULT, FAILURE, RAN, LOG = "result.json", "failed.json", "ran.json", "log.txt"


class Ledger:
    """What of a sweep is done, what failed, and the places for what is under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def case(self, digest: str) -> Path:
        return self.folder / digest

    def work(self, unit: Unit) -> Path:
        return self.folder / ".work" / unit.digest

    def abandon(self, unit: Unit) -> None:
        """Drop what is under way."""
        shutil.rmtree(self.work(unit), ignore_errors=True)

    def log(self, unit: Unit) -> Path:
        """What the worker said while it ran a unit."""
        return self.work(unit) / LOG

    def clean(self, units: Sequence[Unit]) -> None:
        """Remove what sweeps that were killed left of these units where all their cases are done meanwhile."""
        remove_partial(self.folder, "study.json", f"*/{FAILURE}", f"*/{LOG}")
        for unit in units:
            if all(self.result(digest) is not None for digest in unit.digests):
                for one in (unit, *unit.apart()):
                    self.abandon(one)
                for digest in unit.digests:
                    shutil.rmtree(self._draft(digest), ignore_errors=True)

    def save_study(self, study: Study) -> None:
        cases = [{"digest": one.digest, "kind": one.kind, "title": one.title} for one in study.entries]
        write_json(self.folder / "study.json", {"version": VERSION, "name": study.name, "cases": cases})

    def read_study(self) -> dict[str, Any]:
        """The name of the study that was last run here and its cases, each a digest, a kind and a title."""
        found = _read(self.folder / "study.json")
        if found is None or found.get("version") != VERSION:
            raise BadFileError(f"{self.folder} holds no sweep: there is no study.json in it that this Gradveil reads")
        cases = found.get("cases")
        if not isinstance(cases, list) or not all(isinstance(case, dict) and "digest" in case for case in cases):
            raise BadFileError(f"{self.folder / 'study.json'} is damaged: run the sweep again")
        return found

    def result(self, digest: str) -> dict[str, Any] | None:
        """The result of a case that is done. A file that is damaged or of another case is none."""
        found = _read(self.case(digest) / RESULT)
        return found if found is not None and found.get("digest") == digest else None

    def failure(self, digest: str) -> dict[str, Any] | None:
        """The record of a case that failed, with its ``reason``. A file that is damaged is none: it is run again."""
        found = _read(self.case(digest) / FAILURE)
        return found if found is not None and isinstance(found.get("reason"), str) else None

    def seconds(self, digest: str) -> float | None:
        """What a case took, where that is known."""
        took = (_read(self.case(digest) / RAN) or {}).get("seconds")
        return float(took) if isinstance(took, int | float) and 0 <= took < sys.float_info.max else None

    def draft(self, digest: str) -> Path:
        """An empty folder in which that of a case can be prepared."""
        folder = self._draft(digest)
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        return folder

    def _draft(self, digest: str) -> Path:
        return self.folder / ".work" / f"draft-{digest}"

    def publish(self, digest: str, folder: Path, result: dict[str, Any], seconds: float) -> None:
        """Say in the folder of a case that it is done, and put it into its place."""
        write_json(folder / RAN, {"seconds": seconds, "host": socket.gethostname()})
        write_json(folder / RESULT, {"version": VERSION, "digest": digest, **result})
        self.place(digest, folder)

    def place(self, digest: str, folder: Path) -> None:
        """In one step, over what an attempt that failed left there."""
        if self.case(digest).exists():
            shutil.rmtree(self.case(digest))
        folder.rename(self.case(digest))

    def save_failure(self, entry: Entry, reason: str, log: str, *, alone: bool) -> None:
        """``alone``: whether it was run by itself, so that no other case can be to blame."""
        plan = {"kind": entry.kind, "title": entry.title, "case": entry.case.as_json()}
        failure = {"version": VERSION, "digest": entry.digest, "reason": reason, "alone": alone, **plan}
        write_json(self.case(entry.digest) / FAILURE, failure)
        write_atomically(self.case(entry.digest) / LOG, log.encode())


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):  # the last: JSON nested without end
        return None
    return found if isinstance(found, dict) else None
