"""Small studies and their sweeps, for several tests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
DEFENSES = ["none", "noise:sigma=0.1", "clip:bound=1", "sparsify:rate=0.5"]
BASE = {"data": "mnist-samples", "model": "mlp", "images": 2, "gallery": 10, "attacks": "ig:iterations=8,restarts=2"}
CRASHING = """
import ctypes
import os
import signal

from torch import nn


def killed(domain):
    os.kill(os.getpid(), signal.SIGKILL)


def falls(domain):
    ctypes.string_at(0)


def raises(domain):
    if "LUCK" not in os.environ:
        raise RuntimeError("no such luck")
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
"""


def of_seeds(count: int) -> dict[str, Any]:
    """A study of four cases for each seed, which share a batch."""
    return {"base": BASE, "grid": {"seed": list(range(count)), "defenses": DEFENSES}}


def written(folder: Path, fields: dict[str, Any], name: str = "study") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(fields))  # which is YAML too
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gradveil.cli.main", "sweep", *map(str, arguments)]


def sweep(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False)


@contextmanager
def sweeping(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A sweep that runs, until it is left."""
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def results(folder: Path) -> dict[str, bytes]:
    """By digest, the result file and every reconstruction: what may not differ by a bit."""
    return {
        path.parent.name: path.read_bytes()
        + b"".join(one.read_bytes() for one in sorted(path.parent.glob("rows/*/reconstruction.safetensors")))
        for path in folder.glob("*/result.json")
    }


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        return [int(one) for task in tasks.iterdir() for one in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def until(condition: Callable[[], T], seconds: float = 120) -> T:
    """Wait for it; what it was in the end, which is nothing true if it never came."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
