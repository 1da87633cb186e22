"""What defenses cost: accuracy and time of saved trainings, each beside the one without a defense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gradveil.auditing.audit import Cost
from gradveil.auditing.verdict import grade
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.defenses import DEFENSES
from gradveil.federated.run import read_training

_MAY_DIFFER = {
    "defense", "tap", "threat", "evaluate_every", "checkpoint_every", "side_by_side"
}  # fmt: skip
"""Settings in which a training may differ from the undefended one and still be compared with it."""


@dataclass(frozen=True)
class _Run:
    """A finished training."""

    folder: str
    defense: str
    settings: dict[str, Any]
    accuracy: float
    round_seconds: float


def costs(folders: Sequence[str], audited: Sequence[str] | None = None) -> dict[str, Cost]:
    """By defense, what it costs. Refuses trainings that cannot be compared or are of defenses not ``audited``."""
    runs = {run.defense: run for run in map(_read, folders)}
    if len(runs) < len(folders):
        raise GradveilError("two folders of --training are of the same defense: keep one of them")
    if runs and "none" not in runs:
        raise GradveilError("--training needs one without a defense to compare with: gradveil train --defense none")
    for run in runs.values():
        differing = [key for key, value in run.settings.items() if runs["none"].settings.get(key) != value]
        if differing:
            raise GradveilError(
                f"{run.folder} was trained with other settings than the training without a defense "
                f"({', '.join(differing)}): train both alike"
            )
        if audited is not None and run.defense not in (*audited, "none"):
            raise GradveilError(f"{run.folder} was trained under {run.defense}: add --defense {run.defense}")
    return {name: _cost(run, runs["none"]) for name, run in runs.items() if name != "none"}


def _read(folder: str) -> _Run:
    found = read_training(Path(folder))
    if not found.get("complete"):
        raise GradveilError(f"the training in {folder} is not finished: gradveil train --out {folder} --resume")
    try:
        settings = {key: value for key, value in found["case"].items() if key not in _MAY_DIFFER}
        run = _Run(
            folder=folder,
            defense=DEFENSES.canonical(str(found["case"]["defense"])),
            settings=settings,
            accuracy=float(found["rows"][-1]["accuracy"]),
            round_seconds=median(float(row["seconds"]) for row in found["rows"]),
        )
    except (LookupError, TypeError, ValueError):
        raise BadFileError(f"{folder}/train.json is not a training that this Gradveil reads") from None
    if not 0 <= run.accuracy <= 1 or not 0 < run.round_seconds < math.inf:
        raise BadFileError(f"{folder}/train.json is damaged: no training reaches such accuracy or takes such time")
    return run


def _cost(run: _Run, plain: _Run) -> Cost:
    lost, added = plain.accuracy - run.accuracy, run.round_seconds / plain.round_seconds - 1
    points, percent = round(100 * lost, 1), round(100 * added)
    accuracy = f"{abs(points):g} points of accuracy {'lost' if points >= 0 else 'gained'}"
    time = f"{abs(percent)}% {'more' if percent >= 0 else 'less'} time per round"
    return Cost(
        grade=grade(lost, "utility"),
        accuracy=run.accuracy,
        accuracy_lost=lost,
        round_seconds=run.round_seconds,
        time_added=added,
        sentence=f"In training, {accuracy} ({run.accuracy:.1%} instead of {plain.accuracy:.1%}) and {time}.",
    )
