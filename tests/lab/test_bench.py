"""Benchmarks: their commands have their arguments as options, and their results say what was measured where."""

from __future__ import annotations

import inspect
import json

import pytest
from typer.testing import CliRunner

from gradveil.cli.main import app
from gradveil.lab.bench import BENCHES, overhead

runner = CliRunner(env={"COLUMNS": "200"})


@pytest.mark.parametrize("name", BENCHES)
def test_every_argument_of_a_benchmark_is_an_option_of_its_command(name: str) -> None:
    shown = runner.invoke(app, ["bench", name, "--help"]).output
    arguments = set(inspect.signature(BENCHES[name]).parameters) - {"progress", "defenses"}
    assert all(f"--{argument.replace('_', '-')} " in shown for argument in arguments)
    assert ("--defense " in shown) == ("defense" in arguments or name == "overhead")


def test_a_row_is_of_a_defense_and_one_that_does_not_fit_has_the_reason() -> None:
    found = overhead(model="resnet18", batch_size=1, defenses=["clip", "dp"], repeats=1)
    fits, refused = found["rows"]
    assert fits["ratio"] == pytest.approx(fits["step_ms"] / fits["plain_step_ms"], abs=1e-2)
    assert (refused["defense"], refused["step_ms"], refused["ratio"]) == ("dp", None, None)
    assert "batch norm" in refused["refused"].lower()


def test_a_result_begins_with_what_was_asked_for_and_where_it_ran() -> None:
    arguments = ["bench", "overhead", "--model", "mlp", "--batch-size", "2", "--repeats", "1"]
    done = runner.invoke(app, [*arguments, "--defense", "noise", "--defense", "clip"])
    found = json.loads(done.stdout)
    assert list(found)[:6] == ["bench", "model", "batch_size", "device", "repeats", "torch"]
    assert (found["bench"], found["model"], found["batch_size"]) == ("overhead", "mlp", 2)
    assert found["device"].startswith("cpu, ")
    assert [row["defense"] for row in found["rows"]] == ["noise", "clip"]
    assert "to_torch" in found["rows"][0]
