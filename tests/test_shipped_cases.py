"""Every shipped case can be read by the command that its comment names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil.auditing import make_case, read_case
from gradveil.federated import make_training

CASES = sorted((Path(__file__).parents[1] / "cases").glob("*.yaml"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_shipped_case_can_be_read(path: Path) -> None:
    make = make_training if f"gradveil train cases/{path.name}" in path.read_text() else make_case
    assert make(read_case(path)).data
