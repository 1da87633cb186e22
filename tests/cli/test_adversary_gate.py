"""The gate through the command line: nothing slips past it, and nothing that it quotes is a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from gradveil.auditing import Audit, AuditGate, Verdict, write_junit
from gradveil.auditing.audit import Files, Row
from gradveil.cli import audit as command
from gradveil.cli import shown
from gradveil.cli.main import app
from gradveil.cli.progress import Terminal
from gradveil.core.errors import GradveilError

HOSTILE = "::stop-commands::x\r\n::error::]]><b>\x1b[2J\x00\ud800[/x]%0A##[error]" + 40 * "a" + "::warning::"
TINY = [
    "audit",
    "--data",
    "mnist-samples",
    "--model",
    "mlp:hidden=8,depth=1",
    "--attack",
    "analytic",
    "--images",
    "2",
    "--defense",
    "none",
]


def gradveil(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def row(defense: str = "mine", **more: Any) -> Row:
    return Row(**{"defense": defense, "attack": "ig", "images": 1, "files": Files(reconstruction=""), **more})


def scored(defense: str = "mine", **more: Any) -> Row:
    known: dict[str, Any] = {"identified": 0.0, "identified_interval": (0.0, 0.05), "gallery": 100, "at_random": 0.01}
    return row(defense, **{**known, "label_accuracy": 0.0, **more})


def verdict(defense: str = "mine", **more: Any) -> Verdict:
    known = {"identified": 0.0, "identified_interval": (0.0, 0.05), "grade": "A", "sentence": f"Under {defense}."}
    return Verdict(**{"defense": defense, **known, **more})


@pytest.mark.parametrize(
    "text",
    ["recognized=0.1", "identified=10%", "identified=0_1", "identified=-0.1", "identified=inf", "identified=", "a=b=1"],
)
def test_a_bound_that_says_something_else_is_refused_before_anything_runs(text: str, tmp_path: Path) -> None:
    done = gradveil(*TINY, "--fail-above", text, "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, GradveilError)
    assert "cannot read the bound" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--point", "--gate-none"])
def test_an_option_of_the_gate_without_a_gate_is_refused(option: str, tmp_path: Path) -> None:
    done = gradveil(*TINY, option, "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, GradveilError)
    assert option in str(done.exception)
    assert "--fail-above" in str(done.exception)


def test_point_judges_no_grade() -> None:
    with pytest.raises(GradveilError, match="--point says how --fail-above judges"):
        AuditGate.read([], "B", point=True)


def test_the_lowest_of_several_bounds_counts() -> None:
    gate = AuditGate.read(["identified=0.5", "identified=0.01", "identified=0.9"])
    assert len(gate.violations(Audit(rows=(), verdicts=(verdict(),)))) == 1


def test_rows_that_could_not_be_scored_do_not_pass_beside_others_that_could() -> None:
    gate, rows = AuditGate.read(["identified=0.1"], "A"), (scored(), row(stage="round 2"))
    (found,) = gate.violations(Audit(rows=rows, verdicts=(verdict(),)))
    assert found.words == "1 of 2 rows were not scored: there is no truth for them"
    assert gate.violations(Audit(rows=rows[:1], verdicts=(verdict(),))) == []


def test_junit_skips_what_has_no_grade(tmp_path: Path) -> None:
    write_junit(Audit(rows=(), verdicts=(verdict(grade=None),)), tmp_path / "a.xml")
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert (suite.get("skipped"), suite.get("failures")) == ("1", "0")


@pytest.mark.parametrize("gate", [None, AuditGate.read(["identified=0.1"])])
def test_junit_of_an_audit_that_did_not_end_fails(gate: AuditGate | None, tmp_path: Path) -> None:
    write_junit(Audit(rows=(), complete=False, verdicts=(verdict(),)), tmp_path / "a.xml", gate)
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert suite.get("failures") == "1"


def test_what_an_earlier_audit_wrote_does_not_stand_for_one_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_junit(Audit(rows=(), verdicts=(verdict(),)), tmp_path / "a.xml")
    monkeypatch.setattr(command, "run_case", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
    arguments = [*TINY, "--defense", "clip", "--out", str(tmp_path / "out"), "--junit", str(tmp_path / "a.xml")]
    assert gradveil(*arguments).exit_code != 0
    assert ElementTree.parse(tmp_path / "a.xml").getroot().get("failures") == "1"


def test_an_audit_of_the_baseline_alone_passes_no_gate(tmp_path: Path) -> None:
    done = gradveil(*TINY, "--fail-above", "identified=1", "--out", str(tmp_path / "out"))
    assert done.exit_code == 3
    assert "no defense was audited" in done.output
    again = gradveil(*TINY, "--fail-above", "identified=1", "--gate-none", "--out", str(tmp_path / "out"), "--resume")
    assert again.exit_code == 0, again.output
    assert gradveil(*TINY, "--require-grade", "D", "--gate-none", "--out", str(tmp_path / "out"), "--resume").exit_code


def test_nothing_that_is_quoted_is_a_command_or_breaks_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = verdict(HOSTILE, identified=1.0, identified_interval=(0.5, 1.0), grade="F", flags=(HOSTILE,))
    made = Audit(
        rows=(scored(HOSTILE), scored(HOSTILE, training=HOSTILE, stage=HOSTILE)),
        verdicts=(bad,),
        left_out={HOSTILE + "2": HOSTILE},
        class_names={0: HOSTILE},
        case={"budget": "quick"},
    )
    gate = AuditGate.read(["identified=0.1"], "A")
    write_junit(made, tmp_path / "a.xml", gate)
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "2")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setattr(command, "run_case", lambda *_, **__: made)
    monkeypatch.setattr(command, "render", lambda folder: folder / "report.html")
    out = tmp_path / "out"
    done = CliRunner().invoke(app, [*TINY, "--out", str(out), "--fail-above", "identified=0.1", "--require-grade", "A"])
    assert done.exit_code == 3, done.exception
    lines = done.output.splitlines()
    commands = [line for line in lines if line.lstrip().startswith("::")]
    assert len(commands) == 3
    assert all(line.startswith("::error title=gradveil audit%3A %3A%3Astop-commands") for line in commands)
    assert "\x1b" not in done.output
    assert "##[" not in "".join(line for line in lines if line not in commands)
    capsys.readouterr()


def test_names_with_brackets_do_not_end_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal._bars.disable = False
    with terminal.task("clients with [/x]", 2) as task:
        task._told -= 100
        task.note("[/y]")
        task.advance()
        terminal._bars.refresh()
    assert "[/x]" in capsys.readouterr().err


def test_one_line_stays_one_line() -> None:
    assert shown("a\n::error::b\x1b") == "a\\n:\\x3aerror:\\x3ab\\x1b"
