"""Running what a plan says: audits and trainings as a sweep, measurements one by one. What is done is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradveil.auditing.store import Store
from gradveil.core.atomic import remove_partial, write_json
from gradveil.core.environment import environment, is_environment
from gradveil.core.errors import GradveilError
from gradveil.core.locks import claimed
from gradveil.core.reading import read_text
from gradveil.reproduction.expand import Plan, Planned
from gradveil.reproduction.table import Measure
from gradveil.studies import Ledger, Standing, Study, run_study
from gradveil.studies.agenda import agenda_of
from gradveil.studies.local import Start
from gradveil.studies.work import attempt

MEASURED = "measured"
Tell = Callable[[Standing], None]


def run_plan(
    plan: Plan, out: Path, *, workers: int = 1, start: Start = "spawn", tell: Tell = lambda _standing: None
) -> None:
    """Run what is not done yet; cases that failed before are tried again, for a page with holes helps nobody."""
    if plan.study is not None:
        run_study(plan.study, out, workers=workers, start=start, retry=True, tell=tell)
    run_measurements(plan, out)


def run_here(plan: Plan, out: Path, *, tell: Tell = lambda _standing: None) -> None:
    """The same in this process, with whatever data sets it has registered."""
    if plan.study is not None:
        _in_turn(plan.study, out, tell)
    run_measurements(plan, out)


def _in_turn(study: Study, out: Path, tell: Tell) -> None:
    with claimed(out):
        ledger = Ledger(out)
        ledger.save_study(study)
        agenda = agenda_of(study, ledger, retry=True)
        while (unit := agenda.take()) is not None:
            agenda.report(unit, attempt(unit, out, study.threads))
            tell(agenda.standing())


def run_measurements(plan: Plan, out: Path) -> None:
    """What functions measure, one file each; what failed before is tried again, as cases are."""
    with claimed(out):
        remove_partial(out, f"{MEASURED}/*.json")
        for table, lines in plan.pairs():
            for fields in (one for planned in lines if table.measure is not None for one in planned.fields):
                path = measured_file(out, table.title, fields)
                before = _measured(path)
                if table.measure is not None and (before is None or "failed" in before["figures"]):
                    figures = _attempted(table.measure, fields)
                    where = environment(fields["device"])
                    write_json(path, {"fields": fields, "figures": figures, "environment": where})


def _attempted(measure: Measure, fields: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(measure(fields))
    except GradveilError as error:
        return {"failed": str(error)}


def _measured(path: Path) -> dict[str, Any] | None:
    """What a file of a measurement holds; None where there is none, or it is damaged."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("figures"), dict):
        return None
    return found if is_environment(found.get("environment")) else None


def measured_file(out: Path, title: str, fields: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps([title, fields], sort_keys=True).encode()).hexdigest()[:16]
    return out / MEASURED / f"{digest}.json"


def outcome(planned: Planned, table_title: str, out: Path) -> tuple[list[dict[str, Any]], str]:
    """What is there of a line: its results, one for each seed, or why there are none."""
    if not planned.run:
        return [], planned.why
    if planned.entries:
        return _results(planned, Ledger(out))
    files = [_measured(measured_file(out, table_title, fields)) for fields in planned.fields]
    read = [one for one in files if one is not None]
    if len(read) < len(files):
        return [], "not run yet"
    failed = next((one["figures"]["failed"] for one in read if "failed" in one["figures"]), "")
    found = [{**one["figures"], "environment": one["environment"]} for one in read]
    return ([], f"failed: {failed}") if failed else (found, "")


def _results(planned: Planned, ledger: Ledger) -> tuple[list[dict[str, Any]], str]:
    found = [ledger.result(entry.digest) for entry in planned.entries]
    for entry, result in zip(planned.entries, found, strict=True):
        if result is None:
            failure = ledger.failure(entry.digest)
            return [], f"failed: {failure['reason']}" if failure else "not run yet"
        if not _is_readable(result):
            return [], f"its result.json is damaged: delete {ledger.case(entry.digest)} and run it again"
    return [
        _scored(result, ledger.case(entry.digest)) for entry, result in zip(planned.entries, found, strict=True)
    ], ""


def _is_readable(result: dict[str, Any]) -> bool:
    """Whether a result, which may be copied from elsewhere, has what figures and pages are read off."""
    rows, case = result.get("rows"), result.get("case")
    if not is_environment(result.get("environment")) or not isinstance(case, dict) or not isinstance(rows, list):
        return False
    if not rows or not all(isinstance(row, dict) for row in rows):
        return False
    attacked = [row.get("per_image") for row in rows if row.get("prior_of") is None]
    if result.get("kind") == "training" or "per_image" not in rows[0]:
        return result.get("kind") == "training"
    size = case.get("batch_size", 1)
    pictures = all(isinstance(each, list) and each and all(isinstance(one, dict) for one in each) for each in attacked)
    return bool(attacked) and pictures and type(size) is int and size >= 1


def _scored(result: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """The result, with its rows as `gradveil score` left them, where it has been at work since."""
    assert result is not None
    store = Store(folder)
    return {**result, "rows": store.read_audit().as_json()["rows"]} if store.audit.exists() else result
