"""Shares of a GPU on Ray. It hands out cards that a machine says it has, so who gets them shows without one too."""

from __future__ import annotations

import importlib.util
import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.sweeps.sweeps import BASE, sweep, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install 'gradveil[ray]'"),
]

Used = list[tuple[float, float]]
"""CPUs and GPUs that were in use at once, each pair once."""
Watch = Callable[..., Used]


@pytest.fixture(scope="module")
def watched() -> Iterator[Watch]:
    """Sweeps on a machine of four cores and one GPU, and what they had in use."""
    program = [sys.executable, str(Path(__file__).with_name("one_gpu.py"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # for Ray this means: nothing but loopback
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as machine:
            assert machine.stdin is not None
            assert machine.stdout is not None
            address = machine.stdout.readline().strip()

            def watch(folder: Path, grid: dict[str, Any], gpus: float) -> Used:
                study, out = written(folder, {"base": BASE, "grid": grid}), folder / "out"
                ended = sweep(study, "--out", out, "--ray", address, "--gpus", gpus, "--json")
                check_that_all_ran(json.loads(ended.stdout))
                print(file=machine.stdin, flush=True)
                return [(cpus, cards) for cpus, cards in json.loads(machine.stdout.readline())]

            try:
                yield watch
            finally:
                machine.communicate(timeout=60)


def check_that_all_ran(end: dict[str, Any]) -> None:
    """Cases on a GPU get as far as asking for it, which is done or refused on the machine that they were given to."""
    assert end["total"] == end["done"] + len(end["failed"])
    if not torch.cuda.is_available():
        assert all("device=cuda" in title for title in end["failed"])
        assert all("torch sees no GPU here" in reason for reason in end["failed"].values())


def test_two_cases_with_half_a_gpu_each_share_it_and_a_third_waits(watched: Watch, tmp_path: Path) -> None:
    used = watched(tmp_path, {"device": ["cuda"], "seed": [0, 1, 2, 3]}, gpus=0.5)
    assert set(used) - {(1, 0.5)} == {(0, 0), (2, 1)}


def test_cases_with_a_whole_gpu_run_one_after_another(watched: Watch, tmp_path: Path) -> None:
    used = watched(tmp_path, {"device": ["cuda"], "seed": [0, 1, 2]}, gpus=1)
    assert set(used) == {(0, 0), (1, 1)}


def test_cases_on_the_cpu_run_beside_and_take_no_share(watched: Watch, tmp_path: Path) -> None:
    used = watched(tmp_path, {"device": ["cuda", "cpu"], "seed": [0, 1]}, gpus=1)
    assert max(used) == (3, 1), "one of the two on the GPU, both on the CPU"
    assert {cards for _, cards in used} == {0, 1}
