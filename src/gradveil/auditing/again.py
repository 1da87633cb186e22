"""Scoring what an audit saved, without attacking again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gradveil import models
from gradveil.attacks import load_reconstructions
from gradveil.auditing.audit import Audit
from gradveil.auditing.case import make_case
from gradveil.auditing.exchange import broadcast, choose_private
from gradveil.auditing.observed import score_observed
from gradveil.auditing.run import assemble
from gradveil.auditing.scoring import Judge
from gradveil.auditing.store import Store
from gradveil.core.errors import GradveilError
from gradveil.core.locks import alone
from gradveil.core.progress import SILENT, Progress
from gradveil.data import load
from gradveil.defenses import DEFENSES
from gradveil.threat.storage import check_options


@alone
def score_again(folder: Path, *, model: str | None = None, progress: Progress = SILENT) -> Audit:
    """Score the saved reconstructions of an audit anew, such as after weights for LPIPS have been fetched.

    A folder may come from a stranger: a model that it names by import path is built only if the caller names it too.
    """
    store = Store(folder)
    audit = store.read_audit()
    _vet_code(audit.case.get("model"), model)
    if "observations" in audit.case:
        return score_observed(folder, progress=progress)
    case = make_case({**audit.case, "device": _device_here(audit.case.get("device"))})
    data = load(case.data, progress=progress)
    judge = Judge(choose_private(data, case), data.domain, progress=progress)
    rows = []
    for old in audit.rows:
        found = load_reconstructions(store.reconstruction(old.digest))
        check_options(models.split_front(case.model)[1])  # it may be a stranger's, and ask for all memory there is
        module = broadcast(case, DEFENSES.reshaping(old.defense), data).module
        scored = old.model_copy(update=dict(judge.judge(found, module)))
        store.save_row(scored.digest, scored)
        rows.append(scored)
    anew = assemble(case, rows, complete=audit.complete, left_out=audit.left_out)
    store.save_audit(anew.model_copy(update={"case": audit.case, "environment": audit.environment}))
    return store.read_audit()


def _vet_code(named: object, allowed: str | None) -> None:
    """Code that a file names does not run because somebody looks at the file."""
    if isinstance(named, str) and models.is_import_path(named) and named != allowed:
        raise GradveilError(f"this audit runs code of its own, {named}: if you trust it, add --model '{named}'")


def _device_here(device: Any) -> Any:
    """An audit may have run on a machine with a GPU and be scored on one without."""
    return device if device != "cuda" or torch.cuda.is_available() else "cpu"
