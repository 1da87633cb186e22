from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradveil.attacks import Reconstruction, load_reconstructions, save_reconstructions
from gradveil.core.errors import BadFileError
from gradveil.core.tensor_files import write_tensors

FOUND = Reconstruction(
    inputs=torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)),
    labels=torch.tensor([1, 7]),
    objective=0.25,
    objectives=(0.25, float("inf")),
    steps=(0, 10),
    trace=(0.9, 0.25),
    stopped="budget",
    problem_steps=20,
    strategy="loop, reverse",
)


def test_round_trip(tmp_path: Path) -> None:
    save_reconstructions(tmp_path / "x", [FOUND, replace(FOUND, objective=float("inf"), stopped="diverged")])
    first, second = load_reconstructions(tmp_path / "x")
    assert torch.equal(first.inputs, FOUND.inputs)
    assert torch.equal(first.labels, FOUND.labels)
    for field in ("objective", "objectives", "steps", "trace", "stopped", "problem_steps", "strategy"):
        assert getattr(first, field) == getattr(FOUND, field)
    assert second.objective == float("inf")


@pytest.mark.parametrize("meta", [{}, {"sizes": [3], "facts": []}, {"sizes": [2], "facts": [{}]}, {"sizes": "2"}])
def test_a_header_that_does_not_fit_is_one_line(tmp_path: Path, meta: dict[str, object]) -> None:
    write_tensors(tmp_path / "x", "reconstruction", {"inputs": FOUND.inputs, "labels": FOUND.labels}, meta)
    with pytest.raises(BadFileError) as caught:
        load_reconstructions(tmp_path / "x")
    assert "\n" not in str(caught.value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 2**31), new=st.binary(max_size=9), cut=st.booleans())
def test_fuzzed_bytes_never_escape_as_another_error(tmp_path: Path, place: int, new: bytes, cut: bool) -> None:
    save_reconstructions(tmp_path / "x", [FOUND])
    content = bytearray((tmp_path / "x").read_bytes())
    at = place % len(content)
    content[at : len(content) if cut else at + len(new)] = new
    (tmp_path / "x").write_bytes(bytes(content))
    try:
        load_reconstructions(tmp_path / "x")
    except BadFileError as error:
        assert "\n" not in str(error)
