"""The worst days of a sweep: killed at random moments, and a disk that fills up."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from gradveil.lab import bench
from gradveil.lab.sweeps import Start, make_study, run_study
from lab.sweeps.sweeps import alive, children, command, of_seeds, results, sweep, sweeping, until, written

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
"""A place where anybody may mount a disk of a megabyte."""


@pytest.mark.slow
def test_forty_cases_killed_five_times_end_as_if_never_broken(tmp_path: Path) -> None:
    study, whole, broken = written(tmp_path, of_seeds(10)), tmp_path / "whole", tmp_path / "broken"
    started = time.monotonic()
    assert sweep(study, "--out", whole, "--workers", 1).returncode == 0
    took = time.monotonic() - started
    moments, counts = random.Random(5), [0]
    for _ in range(5):
        with sweeping(study, "--out", broken, "--workers", 1) as process:
            assert until(lambda: (broken / "study.json").exists() and children(process.pid))
            time.sleep(moments.uniform(0, 0.2 * took))
            workers = children(process.pid)
        assert until(lambda: not any(map(alive, workers)), 10)  # noqa: B023
        counts.append(len(results(broken)))
    assert counts == sorted(counts)
    assert sweep(study, "--out", broken, "--workers", 2).returncode == 0
    assert len(results(broken)) == 40
    assert results(broken) == results(whole)


@pytest.mark.slow
def test_cases_end_the_same_however_their_process_was_started(tmp_path: Path) -> None:
    study = make_study("study", of_seeds(2))
    for start in get_args(Start):
        assert run_study(study, tmp_path / start, workers=2, start=start).done == 8
    assert results(tmp_path / "spawn") == results(tmp_path / "fork") == results(tmp_path / "here")


@pytest.mark.slow
def test_the_benchmark_compares_a_sweep_with_a_loop() -> None:
    found = bench.sweep(cases=2, iterations=2, repeats=1)
    assert found["ratio"] == pytest.approx(found["sweep_s"] / found["loop_s"], rel=0.02)
    assert 0 < found["runner_s"] < found["sweep_s"]


def _mounts() -> bool:
    try:
        tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or not _mounts(), reason="needs to mount a small disk")
def test_a_full_disk_fails_what_it_meets_and_nothing_after(tmp_path: Path) -> None:
    """The disk is full for a part of the sweep; then there is room again, and the failed cases are asked for."""
    study, out, kept = written(tmp_path, of_seeds(3) | {"together": 1}), tmp_path / "out", tmp_path / "kept"
    out.mkdir()
    run = " ".join(command(study, "--out", out, "--workers", 1, "--json"))
    script = f"""
        mount -t tmpfs -o size=12m none {out}
        head -c 6m /dev/zero > {out}/filler
        {run} > {tmp_path}/first.json
        {run} --status > {tmp_path}/status.json
        rm {out}/filler
        mount -o remount,size=200m {out}
        {run} --retry > {tmp_path}/second.json
        cp -r {out} {kept}
    """
    done = subprocess.run([*NAMESPACE, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert 0 < first["done"] < 12
    assert first["done"] + len(first["failed"]) == 12, "every case was tried"
    assert all("No space left on device" in reason for reason in first["failed"].values())
    assert (second["done"], second["failed"]) == (12, {})
    assert set(results(kept)) == {entry.digest for entry in make_study("study", of_seeds(3)).entries}
    assert os.listdir(kept / ".work") == []
