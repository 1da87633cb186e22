"""Saved exchanges of strangers, through the gate: names that steer, truths that are missing, labels that are people."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from auditing.test_observed import case, train
from gradveil.auditing import AuditGate, run_observed, saved
from gradveil.cli.main import app
from gradveil.data import load
from gradveil.report import render
from gradveil.threat import load_observations, save_observations

HOSTILE = "x\n::stop-commands=y\x1b[2J[/z]<script>alert(1)</script>"


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained") / "plain", defense="clip:bound=1")


@pytest.fixture
def own(tapped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tapped, tmp_path / "own"))


def gradveil(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["audit", "--attack", "analytic", "--gallery", "10", *map(str, arguments)])


def test_a_round_without_its_truth_does_not_pass(own: Path, tmp_path: Path) -> None:
    for path in (own / "taps").glob("round-0003-*.truth.safetensors"):
        path.unlink()
    done = gradveil("--observations", own, "--fail-above", "identified=1", "--out", tmp_path / "a")
    assert done.exit_code == 3, done.output
    assert "1 of 2 rows were not scored" in done.output
    whole = gradveil("--observations", own, "--out", tmp_path / "b")
    assert whole.exit_code == 0, whole.output


def test_the_name_of_a_defense_in_a_file_is_only_text(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (own / "taps").glob("*.safetensors"):
        if not path.name.endswith(".truth.safetensors"):
            seen = [replace(one, defense=HOSTILE) for one in load_observations(path)]
            save_observations(path, seen)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = gradveil(
        "--observations", own, "--require-grade", "A", "--out", tmp_path / "a", "--junit", tmp_path / "a.xml"
    )
    assert done.exit_code == 3, done.output or done.exception
    commands = [line for line in done.output.splitlines() if line.lstrip().startswith("::")]
    assert all(line.startswith("::error title=gradveil audit%3A x%0A%3A%3Astop-commands") for line in commands)
    assert len(commands) == 1
    assert "\x1b" not in done.output
    assert "<script>alert" not in (tmp_path / "a" / "report.html").read_text()
    assert "\x1b" not in (tmp_path / "a.xml").read_text()


def test_people_in_saved_exchanges_are_the_headline_too(
    tapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "load", lambda spec, **_: replace(load(spec), labels_are_people=True))
    audit = run_observed(case(tapped, attacks=["analytic"]), tmp_path / "a")
    assert audit.labels_are_people
    assert "of the people were named by their label" in audit.verdicts[0].sentence
    assert "Labels are people here" in render(tmp_path / "a").read_text()
    assert AuditGate.read(["labels=0.5"]).violations(audit)
