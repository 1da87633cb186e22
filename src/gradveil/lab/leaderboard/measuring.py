"""Measuring one defense in one setting: its trainings and its audits, each as a small record that is kept whole."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from gradveil.auditing import Case
from gradveil.auditing.audit import Audit, Files, ImageScore, Row, Trace
from gradveil.auditing.run import run
from gradveil.auditing.sources import simulated
from gradveil.core.environment import environment
from gradveil.core.progress import SILENT, Progress
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.core.trees import moved
from gradveil.core.types import Json, Params
from gradveil.defenses import check_model
from gradveil.federated import Federation, data_of
from gradveil.lab.leaderboard.settings import Setting, Stage

KIND = "leaderboard training"
"""Of the files of parameters."""
KEPT_OF_IMAGE = ("index", "picture", "label", "label_guess", "rank", "identified_share", "psnr", "client")
"""What rows keep of each private example. ``identified`` and ``label_correct`` follow from it."""


def train(
    setting: Setting, spec: str, seed: int, device: str, *, keep: Path | None = None, seconds: float = math.inf
) -> Json:
    """Train the setting under a defense: the accuracy after each round that was evaluated, and the time of a round.

    The parameters that are broadcast last go into the file ``keep``. After so many ``seconds`` it stops, unfinished.
    """
    case = setting.trained(spec, seed, device)
    assert case is not None, "only settings with a training are trained"
    train_set, test = data_of(case)
    federation = Federation(case, train_set)
    check_model(federation.defense, federation.module)
    federation.defense.check_steps(max(federation.turns_before(case.rounds + 1).values()))
    federation.quality(test)  # what is computed once, such as public features, is no part of a round
    rounds, accuracy, times, dropped, started = [], [], [], 0, time.perf_counter()
    for number in range(1, case.rounds + 1):
        done = federation.round(number)
        times.append(done.seconds)
        dropped += len(done.dropped)
        if number % case.evaluate_every == 0 or number == case.rounds:
            rounds.append(number)
            accuracy.append(round(federation.quality(test).accuracy, 4))
        if time.perf_counter() - started > seconds:
            break
    if keep is not None:
        write_tensors(keep, KIND, federation.state.params, {"round": len(times)})
    return {
        "seed": seed,
        "complete": len(times) == case.rounds,
        "rounds": rounds,
        "accuracy": accuracy,
        "round_seconds": max(1e-4, round(median(times), 4)),
        "dropped": dropped,
        "device": environment(device)["device"],
    }


def parameters_of(path: Path, device: str) -> Params:
    """The parameters that a training kept, by name."""
    return moved(read_tensors(path, KIND)[0], device)


def audit(case: Case, folder: Path, trained: Params | None, progress: Progress = SILENT) -> Audit:
    """Audit defenses on a model as it starts, or with the parameters of a training."""
    plan = simulated(case, trained=trained, progress=progress)
    return run(plan, folder, resume=True, progress=progress)


def records(found: Audit, stage: Stage) -> dict[str, Json]:
    """By defense, what the leaderboard keeps of an audit: its rows with the scores of each example, and its ceilings."""
    priors = [row for row in found.rows if row.is_prior]
    kept: dict[str, Json] = {}
    for defense, why in found.left_out.items():
        kept[defense] = {"stage": stage, "unfit": why}
    for verdict in found.verdicts:
        own = [row for row in found.rows if row.defense == verdict.defense and not row.is_prior]
        needed = [row for row in priors if any(row.prior_of == one.attack for one in own)]
        ceilings = [one and one.model_dump(mode="json") for one in (verdict.ceiling, verdict.ceiling_of_run)]
        kept[verdict.defense] = {
            "stage": stage,
            "rows": [trimmed(row) for row in (*own, *needed)],
            "complete": found.complete,
            "ceilings": ceilings,
            "environment": {name: found.environment.get(name) for name in ("device", "torch")},
        }
    return kept


def trimmed(row: Row) -> Json:
    """A row without what no figure needs."""
    small = row.model_copy(update={"trace": Trace(), "files": Files(reconstruction=""), "log": {}})
    whole = small.model_dump(mode="json", exclude_defaults=True)
    images: Sequence[ImageScore] = row.per_image
    whole["per_image"] = [_image(one) for one in images]
    whole["ranks"] = list(row.ranks)
    return _rounded(whole)


def _image(score: ImageScore) -> Json:
    kept = {name: getattr(score, name) for name in KEPT_OF_IMAGE}
    return {name: value for name, value in kept.items() if value is not None} | {"stopped": score.stopped}


def _rounded(value: Json | list[object] | object) -> Json:
    """The same with five digits after the point: what one example is judged by is no finer."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]  # type: ignore[return-value]
    return round(value, 5) if isinstance(value, float) else value  # type: ignore[return-value]
