"""Running a case: every cell becomes a saved row, and the rows become an audit."""

from __future__ import annotations

import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gradveil import __version__, models
from gradveil.attacks import ATTACKS, Reconstruction, load_reconstructions, save_reconstructions
from gradveil.attacks.storage import finite_or_none
from gradveil.auditing.case import Case, Cell, make_case
from gradveil.auditing.exchange import Exchange, Private, choose_private, exchange
from gradveil.auditing.scoring import Judge
from gradveil.auditing.store import Store
from gradveil.auditing.verdict import PRIOR_ONLY, flagged, verdicts
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.seeding import derive
from gradveil.core.tensor_files import write_tensors
from gradveil.data import load
from gradveil.defenses import DEFENSES
from gradveil.threat import save_observations, threat_model

VERSION = 1


def run_case(case: Case, folder: Path, *, resume: bool = False, progress: Progress = SILENT) -> dict[str, Any]:
    """Audit a case into a folder and return what ``audit.json`` holds. Rows already saved are not run again."""
    _check_device(case)
    _check_threat(case)
    store = Store(folder)
    store.open(resume=resume)
    data = load(case.data, progress=progress)
    private = choose_private(data, case)
    _save_truth(store, private)
    judge = Judge(private, data.domain, progress=progress)

    @cache
    def observed(defense: str) -> Exchange:
        """The exchange of one defense, made when first asked for and saved as the adversary would have it."""
        made = exchange(case, defense, private, data)
        save_observations(store.observation(defense), made.observations)
        return made

    cells = case.cells()
    rows: list[dict[str, Any]] = []
    with progress.task("audit", len(cells), "rows") as task:
        for cell in cells:
            task.note(cell.title)
            row = store.row(cell.digest())
            if row is None:
                row = _run_cell(cell, observed(cell.defense), judge, store, progress)
                store.save_row(cell.digest(), row)
            rows.append(row)
            store.save_audit(assemble(case, rows, complete=len(rows) == len(cells)))
            task.advance()
    return store.read_audit()


def score_again(folder: Path, *, progress: Progress = SILENT) -> dict[str, Any]:
    """Score the saved reconstructions of an audit anew, such as after weights for LPIPS have been fetched."""
    store = Store(folder)
    audit = store.read_audit()
    case = make_case(audit["case"])
    data = load(case.data, progress=progress)
    judge = Judge(choose_private(data, case), data.domain, progress=progress)
    rows = []
    for old in audit["rows"]:
        found = load_reconstructions(store.reconstruction(old["digest"]))
        module = DEFENSES.build(old["defense"]).on_model(models.build(case.model, data.domain, seed=case.seed))
        row = {**old, **judge.row(found, module)}
        store.save_row(row["digest"], row)
        rows.append(row)
    store.save_audit(assemble(case, rows, complete=audit["complete"]))
    return store.read_audit()


def assemble(case: Case, rows: list[dict[str, Any]], *, complete: bool) -> dict[str, Any]:
    """The audit as saved: the case, where it ran, its rows and what they say."""
    marked = flagged(rows)
    return {
        "version": VERSION,
        "complete": complete,
        "case": case.as_json(),
        "environment": environment(case.device),
        "rows": marked,
        "verdicts": verdicts(marked),
    }


def environment(device: str) -> dict[str, Any]:
    """What the numbers depend on besides the case."""
    return {
        "gradveil": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def _run_cell(cell: Cell, seen: Exchange, judge: Judge, store: Store, progress: Progress) -> dict[str, Any]:
    case, digest = cell.case, cell.digest()
    attack = ATTACKS.build(cell.attack, case.effort())
    alone = attack.prior_only()
    chosen = alone if cell.prior_only and alone is not None else attack
    started = time.perf_counter()
    seeds = [derive(case.seed, "attack", i) for i in range(len(seen.observations))]
    found = chosen(seen.observations, seeds=seeds, progress=progress)
    seconds = time.perf_counter() - started
    save_reconstructions(store.reconstruction(digest), found)
    threat = threat_model(case.threat)
    return {
        "digest": digest,
        "defense": cell.defense,
        "attack": PRIOR_ONLY if cell.prior_only else cell.attack,
        "prior_of": cell.attack if cell.prior_only else None,
        "threat": case.threat,
        "assumptions": threat.sentences(),
        **judge.row(found, seen.module),
        "objective": finite_or_none(sum(one.objective for one in found) / len(found)),
        "seconds": seconds,
        "problem_steps": sum(one.problem_steps for one in found),
        "strategy": found[0].strategy,
        "log": seen.log.means(),
        **seen.log.means(),
        "trace": _trace(found),
        "files": {
            "reconstruction": store.relative(store.reconstruction(digest)),
            "observation": store.relative(store.observation(cell.defense)),
            "truth": store.relative(store.truth),
        },
    }


def _trace(found: list[Reconstruction]) -> dict[str, Any]:
    curves = [[finite_or_none(value) for value in one.trace] for one in found]
    return {"steps": list(found[0].steps), "objective": curves}


def _save_truth(store: Store, private: Private) -> None:
    tensors = {"inputs": private.batch.inputs, "labels": private.batch.labels, "index": private.index}
    write_tensors(store.truth, "truth", tensors, {})


def _check_device(case: Case) -> None:
    if case.device == "cuda" and not torch.cuda.is_available():
        raise GradveilError("device cuda was asked for, but torch sees no GPU here: use --device cpu")


def _check_threat(case: Case) -> None:
    threat = threat_model(case.threat)
    for spec in case.attacks:
        threat.vet(spec, ATTACKS.build(spec, case.effort()).requires)
