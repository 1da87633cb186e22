"""The folder of a sweep. A case is done when its ``result.json`` is there; its folder is put into place as a whole.

::

    study.json                 the cases, for --status
    DIGEST/                    the folder of an audit or a training, with these beside:
      result.json              case, metrics and versions, nothing that differs from run to run: the case is done
      ran.json                 seconds, and where
      failed.json, log.txt     or: why it is not, and what was printed
    results.jsonl.gz           result.json and ran.json of many cases, packed to be kept: these cases are done too
    .work/BATCH/               what is under way, or was when the sweep ended
    .lock                      held while a sweep runs here; names its process

Folders named by a digest can be copied here from another machine: that is how results are merged.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import socket
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from gradveil.core.atomic import make_folder, remove_partial, write_atomically, write_json
from gradveil.core.errors import BadFileError
from gradveil.core.reading import MOST, read_bytes, read_json
from gradveil.core.types import Json
from gradveil.lab.audits import result_of
from gradveil.lab.sweeps.study import CaseBatch, Study, StudyEntry

VERSION = 1
MEASURED = "measured"
"""The folder of what was measured outside of the sweep."""
RESULT, FAILURE, RAN, LOG, PACKED = "result.json", "failed.json", "ran.json", "log.txt", "results.jsonl.gz"


@dataclass(frozen=True)
class Status:
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

    @classmethod
    def of(
        cls,
        titles: Mapping[str, str],
        *,
        done: Collection[str],
        running: Mapping[str, float],
        failed: Mapping[str, str],
        seconds: Sequence[float],
        workers: int,
    ) -> Status:
        """From the digests of cases: the titles of all of them, and which are done, run or failed."""
        return cls(
            total=len(titles),
            done=len(done),
            running={titles[digest]: since for digest, since in running.items()},
            failed={titles[digest]: reason for digest, reason in failed.items()},
            left=len(titles) - len(done) - len(running) - len(failed),
            seconds_per_case=fmean(seconds) if seconds else None,
            workers=workers,
        )

    @property
    def estimate(self) -> float | None:
        """Seconds until all is done, if the rest takes as long as what is done did."""
        if self.seconds_per_case is None:
            return None
        begun = sum(min(seconds, self.seconds_per_case) for seconds in self.running.values())
        return max(0.0, self.seconds_per_case * (self.left + len(self.running)) - begun) / max(1, self.workers)

    def as_json(self) -> Json:
        shown = asdict(self) | {"running": sorted(self.running), "estimate_s": self.estimate}
        del shown["workers"]
        return shown


class ResultFolder:
    """What of a sweep is done, what failed, and the places for what is under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def case(self, digest: str) -> Path:
        return self.folder / digest

    def work(self, batch: CaseBatch) -> Path:
        return self.folder / ".work" / batch.digest

    def log(self, batch: CaseBatch) -> Path:
        """What the worker printed while it ran a batch."""
        return self.work(batch) / LOG

    def abandon(self, batch: CaseBatch) -> None:
        """Drop what is under way."""
        shutil.rmtree(self.work(batch), ignore_errors=True)

    def clean(self, batches: Sequence[CaseBatch]) -> None:
        """Remove what sweeps that were killed left of these batches where all their cases are done meanwhile."""
        remove_partial(self.folder, "study.json", f"*/{FAILURE}", f"*/{LOG}")
        for batch in batches:
            if all(self.result(digest) is not None for digest in batch.digests):
                for one in (batch, *batch.apart()):
                    self.abandon(one)
                for digest in batch.digests:
                    shutil.rmtree(self._draft(digest), ignore_errors=True)

    def save_study(self, study: Study) -> None:
        cases = [{"digest": one.digest, "kind": one.kind, "title": one.title} for one in study.entries]
        write_json(self.folder / "study.json", {"version": VERSION, "name": study.name, "cases": cases})

    def titles(self) -> dict[str, str]:
        """By digest, the titles of the cases of the study that was last run here."""
        found = _read(self.folder / "study.json")
        if found is None or found.get("version") != VERSION:
            raise BadFileError(f"{self.folder} holds no sweep: there is no study.json in it that this Gradveil reads")
        cases = found.get("cases")
        if not isinstance(cases, list) or not all(isinstance(case, dict) and "digest" in case for case in cases):
            raise BadFileError(f"{self.folder / 'study.json'} is damaged: run the sweep again")
        return {str(case["digest"]): str(case.get("title", "")) for case in cases}

    def result(self, digest: str) -> Json | None:
        """The result of a case that is done. A file that is damaged or of another case is none."""
        found = _read(self.case(digest) / RESULT) or self._packed.get(digest, {}).get("result")
        return found if isinstance(found, dict) and found.get("digest") == digest else None

    def measured(self, digest: str) -> object:
        """What a measurement found that is no case of a sweep; None where it is not done."""
        found = _read(self.folder / MEASURED / f"{digest}.json")
        return self._packed.get(digest, {}).get("measured") if found is None else found

    def failure(self, digest: str) -> Json | None:
        """The record of a case that failed, with its ``reason``. A file that is damaged is none: it is run again."""
        found = _read(self.case(digest) / FAILURE)
        return found if found is not None and isinstance(found.get("reason"), str) else None

    def seconds(self, digest: str) -> float | None:
        """What a case took, where that is known."""
        ran = _read(self.case(digest) / RAN) or self._packed.get(digest, {}).get("ran")
        took = ran.get("seconds") if isinstance(ran, dict) else None
        return float(took) if isinstance(took, int | float) and 0 <= took < sys.float_info.max else None

    def recorded(self, digests: Collection[str]) -> tuple[set[str], dict[str, Json], list[float]]:
        """Of these cases: those that are done, the failures of others, and the seconds that the done ones took."""
        done = {digest for digest in digests if self.result(digest) is not None}
        failures = {digest: one for digest in digests if digest not in done and (one := self.failure(digest))}
        return done, failures, [took for digest in done if (took := self.seconds(digest)) is not None]

    @cached_property
    def _packed(self) -> dict[str, Json]:
        """By digest, ``result`` and ``ran`` of the cases that were packed; a file that is damaged has none."""
        try:
            content = read_bytes(self.folder / PACKED)
            with gzip.open(io.BytesIO(content)) as file:
                lines = file.read(MOST).decode().splitlines()
            found = [json.loads(line) for line in lines]
        except (OSError, EOFError, ValueError, RecursionError, zlib.error):
            return {}
        return {str(one.get("digest")): one for one in found if isinstance(one, dict)}

    def pack(self, target: Path) -> None:
        """Write the results of all cases that are done, without their pictures and updates, as one file elsewhere.

        What was packed there before stays, unless it was run anew.
        """
        lines = {**ResultFolder(target)._packed, **self._packed}
        for path in sorted(self.folder.glob(f"*/{RESULT}")):
            digest = path.parent.name
            if (result := self.result(digest)) is not None:
                ran = _read(path.with_name(RAN))
                lines[digest] = {"digest": digest, "ran": ran, "result": result | result_of(result)}
        for path in sorted((self.folder / MEASURED).glob("*.json")):
            lines[path.stem] = {"digest": path.stem, "measured": _read(path)}
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for _, line in sorted(lines.items()))
        write_atomically(target / PACKED, gzip.compress(text.encode(), mtime=0))

    def draft(self, digest: str) -> Path:
        """An empty folder in which that of a case can be prepared."""
        folder = self._draft(digest)
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        return folder

    def _draft(self, digest: str) -> Path:
        return self.folder / ".work" / f"draft-{digest}"

    def publish(self, digest: str, folder: Path, result: Json, seconds: float) -> None:
        """Write into the folder of a case that it is done, and put it into its place."""
        write_json(folder / RAN, {"seconds": seconds, "host": socket.gethostname()})
        write_json(folder / RESULT, {"version": VERSION, "digest": digest, **result})
        self.place(digest, folder)

    def place(self, digest: str, folder: Path) -> None:
        """In one step, over what an attempt that failed left there."""
        if self.case(digest).exists():
            shutil.rmtree(self.case(digest))
        folder.rename(self.case(digest))

    def save_failure(self, entry: StudyEntry, reason: str, log: str, *, alone: bool) -> None:
        """``alone``: whether it was run by itself, so that no other case can be to blame."""
        plan = {"kind": entry.kind, "title": entry.title, "case": entry.case.as_json()}
        failure = {"version": VERSION, "digest": entry.digest, "reason": reason, "alone": alone, **plan}
        write_json(self.case(entry.digest) / FAILURE, failure)
        write_atomically(self.case(entry.digest) / LOG, log.encode())


def _read(path: Path) -> Json | None:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
