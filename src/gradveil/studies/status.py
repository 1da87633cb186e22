"""Where a sweep stands, read off its folder by somebody who does not run it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from gradveil.core.locks import holder
from gradveil.studies.agenda import Standing
from gradveil.studies.ledger import Ledger


def status_of(folder: Path) -> Standing:
    """The standing of the study that was last run in a folder; running are the cases that a live sweep names."""
    ledger, now = Ledger(folder), holder(folder) or {}
    cases = {str(case["digest"]): str(case.get("title", "")) for case in ledger.read_study()["cases"]}
    done = {digest for digest in cases if ledger.result(digest) is not None}
    running = [digest for digest in now.get("running", []) if digest in cases and digest not in done]
    open_ = [digest for digest in cases if digest not in done and digest not in running]
    failed = {digest: failure for digest in open_ if (failure := ledger.failure(digest)) is not None}
    took = [seconds for digest in done if (seconds := ledger.seconds(digest)) is not None]
    return Standing(
        total=len(cases),
        done=len(done),
        running=dict.fromkeys((cases[digest] for digest in running), 0.0),
        failed={cases[digest]: str(failure["reason"]) for digest, failure in failed.items()},
        left=len(open_) - len(failed),
        seconds_per_case=fmean(took) if took else None,
        workers=int(now.get("workers", 1)),
    )
