"""What the runner of a sweep costs: the same cases by one worker, and in a plain loop."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from gradveil.auditing import Case, run_case
from gradveil.bench.timing import seconds
from gradveil.studies import Ledger, Study, make_study, run_study


def sweep(
    *, cases: int = 20, iterations: int = 300, model: str = "lenet:init=wide", repeats: int = 3
) -> dict[str, Any]:
    """Seconds of the fastest of each, in turn in the same run; every case has its own seed, so that none share a batch.

    ``runner_s`` is the time of that sweep that was not spent in cases: it does not depend on what else the machine did.
    """
    base = {"model": model, "images": 2, "attacks": f"ig:iterations={iterations}", "restarts": 2, "defenses": "none"}
    study = make_study("bench", {"base": base, "grid": {"seed": list(range(cases))}})
    before = torch.get_num_threads()
    torch.set_num_threads(study.threads)
    try:
        swept, looped = zip(*(_once(study) for _ in range(repeats)), strict=True)
    finally:
        torch.set_num_threads(before)
    sweep_s, in_cases = min(swept)
    return {
        "bench": "sweep",
        "cases": cases,
        "model": model,
        "iterations": iterations,
        "device": f"cpu, {study.threads} thread",
        "torch": torch.__version__,
        "sweep_s": round(sweep_s, 2),
        "loop_s": round(min(looped), 2),
        "ratio": round(sweep_s / min(looped), 4),
        "runner_s": round(sweep_s - in_cases, 3),
        "runner_share": round(1 - in_cases / sweep_s, 4),
    }


def _once(study: Study) -> tuple[tuple[float, float], float]:
    """A sweep, in all and within cases, and a loop; both into fresh folders."""
    with tempfile.TemporaryDirectory() as name:
        out, plain = Path(name) / "sweep", Path(name) / "loop"
        whole = seconds(lambda: run_study(study, out, start="fork"), "cpu")
        within = sum(Ledger(out).seconds(entry.digest) or 0.0 for entry in study.entries)

        def loop() -> None:
            for entry in study.entries:
                assert isinstance(entry.case, Case)
                run_case(entry.case, plain / entry.digest)

        return (whole, within), seconds(loop, "cpu")
