"""Scoring what an audit saved, without attacking again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradveil.attacks import load_reconstructions
from gradveil.auditing.case import make_case
from gradveil.auditing.exchange import broadcast, choose_private
from gradveil.auditing.observed import score_observed
from gradveil.auditing.run import assemble
from gradveil.auditing.scoring import Judge
from gradveil.auditing.store import Store
from gradveil.core.progress import SILENT, Progress
from gradveil.data import load
from gradveil.defenses import DEFENSES


def score_again(folder: Path, *, progress: Progress = SILENT) -> dict[str, Any]:
    """Score the saved reconstructions of an audit anew, such as after weights for LPIPS have been fetched."""
    store = Store(folder)
    audit = store.read_audit()
    if "observations" in audit["case"]:
        return score_observed(folder, progress=progress)
    case = make_case(audit["case"])
    data = load(case.data, progress=progress)
    judge = Judge(choose_private(data, case), data.domain, progress=progress)
    rows = []
    for old in audit["rows"]:
        found = load_reconstructions(store.reconstruction(old["digest"]))
        module = broadcast(case, DEFENSES.reshaping(old["defense"]), data).module
        scored = {**old, **judge.row(found, module)}
        store.save_row(scored["digest"], scored)
        rows.append(scored)
    store.save_audit(assemble(case, rows, complete=audit["complete"]))
    return store.read_audit()
