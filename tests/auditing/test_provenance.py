"""Where an audit comes from: when, by which Gradveil, from which data and by which command. No number depends on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gradveil
from gradveil.auditing import Case, read_audit, run_case, score_again
from gradveil.auditing.audit import Audit, Provenance
from gradveil.cli.main import app
from gradveil.core import environment
from gradveil.data import load

TINY = Case(data="mnist-samples", model="mlp", images=2, gallery=10, defenses=("none",), attacks=("analytic",))


def about(audit: Audit) -> Provenance:
    assert audit.provenance is not None
    return audit.provenance


def test_an_audit_says_where_it_comes_from_and_its_rows_do_not(tmp_path: Path) -> None:
    one = run_case(TINY, tmp_path / "one", command="gradveil audit one")
    two = run_case(TINY, tmp_path / "two", command="gradveil audit two")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", about(one).started)
    assert about(one).version == gradveil.__version__
    assert about(one).commands == ("gradveil audit one",)
    assert about(one).data != about(one).line_up
    assert (about(one).data, about(one).line_up) == (about(two).data, about(two).line_up)
    timeless = [[row.model_copy(update={"seconds": 0.0}) for row in audit.rows] for audit in (one, two)]
    assert timeless[0] == timeless[1]
    assert read_audit(tmp_path / "one").provenance == one.provenance


@pytest.mark.parametrize("change", [{"every": 2}, {"images": 3}, {"data": "cifar10-samples"}])
def test_other_data_has_another_digest(tmp_path: Path, change: dict[str, object]) -> None:
    one = run_case(TINY, tmp_path / "one")
    other = run_case(TINY.model_copy(update=change), tmp_path / "other")
    assert about(one).data != about(other).data


def test_another_line_up_of_the_same_data_has_another_digest(tmp_path: Path) -> None:
    one, other = run_case(TINY, tmp_path / "one"), run_case(TINY.model_copy(update={"seed": 1}), tmp_path / "other")
    assert about(one).data == about(other).data
    assert about(one).line_up != about(other).line_up


def test_who_goes_on_adds_a_command_and_keeps_the_start(tmp_path: Path) -> None:
    run_case(TINY, tmp_path, command="first")
    audit = json.loads((tmp_path / "audit.json").read_text())
    audit["provenance"]["started"] = "2020-01-01T00:00:00Z"
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    more = TINY.model_copy(update={"defenses": ("none", "clip:bound=1.0")})
    for _ in range(2):
        found = run_case(more, tmp_path, resume=True, command="second")
    assert about(found).started == "2020-01-01T00:00:00Z"
    assert about(found).commands == ("first", "second")
    assert about(score_again(tmp_path)) == about(found)


def test_older_files_are_read_without_it(tmp_path: Path) -> None:
    run_case(TINY, tmp_path)
    audit = json.loads((tmp_path / "audit.json").read_text())
    del audit["provenance"], audit["class_names"]
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    assert read_audit(tmp_path).provenance is None
    assert about(run_case(TINY, tmp_path, resume=True)).commands == ()


def test_labels_are_named_where_they_have_names(tmp_path: Path) -> None:
    cifar = TINY.model_copy(update={"data": "cifar10-samples", "model": "mlp"})
    run_case(cifar, tmp_path / "cifar")
    names = read_audit(tmp_path / "cifar").class_names
    assert (names[0], names[1]) == ("airplane", "automobile")
    assert run_case(TINY, tmp_path / "mnist").class_names == {}, "a digit is its own name"


def test_the_command_line_is_kept_without_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = ["audit", "--data", "mnist-samples", "--model", "mlp", "--images", "2", "--gallery", "10"]
    arguments += ["--attack", "analytic", "--defense", "none", "--out", f"{tmp_path}/a b"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    kept = about(read_audit(tmp_path / "a b")).commands
    assert kept == (f"gradveil {' '.join(arguments[:-1])} '~/a b'",)
    assert str(tmp_path) not in (tmp_path / "a b" / "audit.json").read_text()


def test_another_folder_that_begins_like_the_home_folder_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/eve")
    assert environment.without_home("/home/evelyn/a /home/eve/a /home/eve") == "/home/evelyn/a ~/a ~"
    monkeypatch.setenv("HOME", "/")
    assert environment.without_home("/tmp/a") == "/tmp/a"


def test_a_call_in_python_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    batch = load("mnist-samples").batch([0, 1])
    found = gradveil.audit(model, batch, defenses=[gradveil.defenses.Noise(sigma=0.5)], attacks="analytic", seed=3)
    (call,) = about(found.audit).commands
    assert call.startswith("gradveil.audit(model, batch, defenses=['noise:sigma=0.5'], attacks=['analytic'], ")
    assert "seed=3" in call
    again = eval(call, {"gradveil": gradveil, "model": model, "batch": batch})
    assert [row.psnr for row in again.rows] == [row.psnr for row in found.rows]


def git(folder: Path, *words: str) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    known = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", *known, *words], cwd=folder, env=plain, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_is_that_of_the_source_tree_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside a git hook, which sets GIT_DIR, and not that of a project in which Gradveil is installed."""
    for name in ("checkout", "other"):
        package = tmp_path / name / "src" / "gradveil"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(name)
        git(tmp_path / name, "init", "-q")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-qm", name)
    installed = tmp_path / "other" / ".venv" / "lib" / "gradveil" / "__init__.py"
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))

    def commit_of(path: Path) -> str | None:
        monkeypatch.setattr(gradveil, "__file__", str(path))
        return environment.source_commit.__wrapped__()

    source = tmp_path / "checkout" / "src" / "gradveil" / "__init__.py"
    assert commit_of(source) == git(tmp_path / "checkout", "rev-parse", "HEAD")
    source.write_text("changed")
    assert (commit_of(source) or "").endswith("-dirty")
    assert commit_of(installed) is None
