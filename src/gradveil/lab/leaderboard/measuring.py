"""Measuring one defense in one setting: its trainings and its audits, each as a small record that is kept whole."""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import median

from gradveil.auditing import Case
from gradveil.auditing.audit import Audit
from gradveil.auditing.run import run
from gradveil.auditing.sources import simulated
from gradveil.core.environment import environment
from gradveil.core.progress import SILENT, Progress
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.core.trees import moved
from gradveil.core.types import Json, Params
from gradveil.defenses import check_model
from gradveil.federated import Federation, data_of
from gradveil.lab.leaderboard.settings import Setting

KIND = "leaderboard training"
"""Of the files of parameters."""


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
