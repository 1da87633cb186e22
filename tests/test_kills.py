"""Commands that are killed and resumed end as if they had never been: a small version of ``make kills``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "kills.py"
SCENARIOS = ("audit", "train", "sweep", "assets", "two audits")


@pytest.mark.slow
def test_ten_kills_lose_nothing() -> None:
    only = [word for name in SCENARIOS for word in ("--only", name)]
    command = [sys.executable, str(SCRIPT), "--warm", "--count", "10", "--most", "2", "--json", *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    tallies = json.loads(done.stdout)
    assert tallies.keys() == set(SCENARIOS)
    assert sum(tally["kills"] for tally in tallies.values()) >= 10
    assert all(tally["problems"] == [] for tally in tallies.values())
