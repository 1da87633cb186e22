"""Measuring defenses in a setting of the leaderboard. What was measured before is kept, as audits and trainings do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gradveil.auditing import Audit, Row, run_case
from gradveil.auditing.case import Case
from gradveil.auditing.verdict import without_candidates, worst_of
from gradveil.core.progress import SILENT, Progress
from gradveil.defenses import DEFENSES
from gradveil.federated import run_training
from gradveil.studies.leaderboard.entries import (
    Entry,
    Trained,
    Worst,
    checked_spec,
    kept_of,
    path_of,
    read_entry,
    save_entry,
)
from gradveil.studies.leaderboard.settings import Setting


def enter(
    setting: Setting,
    defenses: Sequence[str],
    folder: Path,
    work: Path,
    *,
    device: str,
    train: bool = True,
    progress: Progress = SILENT,
) -> Iterator[Path]:
    """Measure these defenses and write their entries below ``folder``; all that is large stays below ``work``."""
    specs = [checked_spec(DEFENSES.canonical(spec)) for spec in defenses]
    before = {spec: read_entry(path_of(folder, setting.name, spec)) for spec in specs}  # first: an audit takes long
    audit = _audited(setting.case(specs, device), work / setting.name / "audit", progress)
    for spec in specs:
        entered = before[spec]
        kept = None if entered is None else entered.trained
        fits = train and spec not in audit.left_out
        trained = _trained(setting, spec, work, device, progress) if fits else None
        yield save_entry(folder, _entry(setting, spec, audit, trained or kept))


def _audited(case: Case, folder: Path, progress: Progress) -> Audit:
    """The audit of a case; rows that the folder holds already, of these or other defenses, are not run again."""
    return run_case(case, folder, resume=True, progress=progress)


def _trained(setting: Setting, spec: str, work: Path, device: str, progress: Progress) -> Trained | None:
    case = setting.trained(spec, device)
    if case is None:
        return None
    data, model = setting.name.split("-")[:2]
    folder = work / "trainings" / f"{data}-{model}" / path_of(Path(), setting.name, spec).stem
    done = run_training(case, folder, resume=True, progress=progress)
    return Trained(
        accuracy=done["rows"][-1]["accuracy"],
        rounds=len(done["rows"]),
        round_seconds=max(0.001, round(median(row["seconds"] for row in done["rows"]), 3)),  # others are divided by it
        device=done["environment"]["device"],
    )


def _entry(setting: Setting, spec: str, audit: Audit, trained: Trained | None) -> Entry:
    case, environment = kept_of(audit.case), audit.environment
    about: dict[str, Any] = {"setting": setting.name, "defense": spec, "case": case, "environment": environment}
    if spec in audit.left_out:
        return Entry(**about, unfit=audit.left_out[spec])
    rows = [row for row in audit.rows if row.defense == spec and not row.is_prior]
    verdict = next(one for one in audit.verdicts if one.defense == spec)
    return Entry(
        **about,
        grade=verdict.grade,
        worst=_worst([row for row in rows if row.attack == verdict.attack]),
        rebuilt=_worst(without_candidates(rows)),
        flags=verdict.flags,
        trained=trained,
        attacks=tuple(row.attack for row in rows),
    )


def _worst(rows: Sequence[Row]) -> Worst | None:
    worst = worst_of(rows)
    if worst is None or worst.identified is None or worst.identified_interval is None:
        return None
    return Worst(
        attack=worst.attack,
        identified=worst.identified,
        interval=worst.identified_interval,
        images=worst.images,
    )
