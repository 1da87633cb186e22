"""``gradveil train`` as a person meets it."""

from __future__ import annotations

import json
import re
import subprocess
import time
import warnings
from pathlib import Path
from typing import NoReturn

import pytest

from cli.test_cli import command
from cli.test_cli import gradveil as in_a_process
from gradveil.core.errors import GradveilError
from gradveil.defenses.accounting import guarantee

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer loads names that click is about to drop
    from gradveil.cli.main import app

TINY = ["--data", "mnist-samples", "--model", "mlp:hidden=8,depth=1", "--clients", "4", "--batch-size", "8"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def gradveil(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


def test_train_writes_what_it_says_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    gradveil("train", *TINY, "--rounds", "2", "--defense", "outpost", "--out", "first")
    first, *more, last = capsys.readouterr().out.strip().splitlines()
    pattern = r"[\d.]+% accuracy under outpost after 2 rounds of fedavg on mnist-samples: .* s, .* MB up, .* MB down"
    assert re.fullmatch(pattern, first)
    assert any(line.startswith("perturbed in the last round: ") for line in more)
    assert last == "training: first/train.json"
    gradveil("train", "--out", "first", "--resume", "--rounds", "3", "--json")
    result = json.loads(capsys.readouterr().out)
    assert [row["round"] for row in result["rows"]] == [1, 2, 3]
    assert result["case"]["defense"] == "outpost"


def test_train_says_what_was_spent_and_refuses_more_than_planned(capsys: pytest.CaptureFixture[str]) -> None:
    private = [*TINY, "--defense", "dp:sigma=2,steps=2", "--out", "private"]
    gradveil("train", *private, "--rounds", "2")
    spent = guarantee(sigma=2.0, sample_rate=1.0, steps=2).epsilon
    shown = capsys.readouterr()
    assert f"epsilon {spent:.4g} at delta 1e-05, by the client that took part most" in shown.out.splitlines()
    assert f"epsilon_planned in the last round: {spent:.4g}" in shown.out.splitlines()
    with pytest.raises(GradveilError, match="takes part in 3 steps, more than the 2 that are planned"):
        gradveil("train", "--out", "private", "--resume", "--rounds", "3")


def test_a_case_file_and_options_over_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("case.yaml").write_text(
        "data: mnist-samples\nmodel: 'mlp:hidden=8,depth=1'\nalgorithm: fedsgd\nclients: 3\nrounds: 9\nbatch_size: 4\n"
    )
    gradveil("train", "case.yaml", "--rounds", "1", "--tap", "0@1", "--out", "a", "--json")
    assert json.loads(capsys.readouterr().out)["case"]["rounds"] == 1
    gradveil("attack", "a/taps/round-0001-client-0000.safetensors", "--attack", "ig:iterations=3", "--out", "b")
    assert Path("b/000.png").exists()


@pytest.mark.integration
def test_what_a_tap_saved_is_audited(capsys: pytest.CaptureFixture[str]) -> None:
    sgd = [*TINY, "--algorithm", "fedsgd", "--batch-size", "1", "--rounds", "2", "--tap", "0@1", "--tap", "0@2"]
    gradveil("train", *sgd, "--out", "tapped")
    gradveil("audit", "--observations", "tapped", "--attack", "analytic", "--gallery", "10", "--out", "a")
    said = capsys.readouterr().out
    assert re.search(r"tapped +none +analytic +round 2 .* 100% ", said)
    assert "In round 1 without a defense, the private image was picked out of 10" in said
    assert Path("a/report.html").exists()
    gradveil("score", "a", "--metric", "identified")
    assert re.search(r"tapped\s+round 2\s+none\s+analytic\s+1.0", capsys.readouterr().out)
    Path("case.yaml").write_text("observations: [tapped]\nattacks: [analytic]\ngallery: 10\ndevice: cpu\n")
    gradveil("audit", "case.yaml", "--out", "a", "--resume", "--json")
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2
    with pytest.raises(GradveilError, match="saved exchanges fix --data"):
        gradveil("audit", "--observations", "tapped", "--data", "mnist")
    Path("tapped/taps/round-0002-client-0000.truth.safetensors").unlink()
    Path("tapped/taps/round-0001-client-0000.truth.safetensors").unlink()
    bound = ["--fail-above", "identified=0.1", "--gate-none"]
    ended = app(["audit", "--observations", "tapped", "--attack", "analytic", *bound], standalone_mode=False)
    assert ended == 3, "what is not known does not pass"
    printed = capsys.readouterr()
    assert "there is no truth beside the exchange" in printed.out
    assert "identified is not known under none" in printed.err


def test_trainings_on_one_page() -> None:
    for name, lr in (("slow", "0.01"), ("fast<b>", "0.1")):
        gradveil("train", *TINY, "--rounds", "2", "--lr", lr, "--out", name)
    gradveil("train", "--compare", "slow", "fast<b>", "--out", "page.html")
    page = Path("page.html").read_text()
    assert page.count('<path class="line line-0"') == 1 + 3
    assert page.count('<path class="line line-1"') == 1 + 3
    assert "fast&lt;b&gt;" in page
    assert "<b>" not in page
    assert not re.search(r"(src|href)=\"(?!data:,)", page)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--clients", "0"], "clients is a whole number"),
        (["--data", "mnist-samples", "--clients", "99"], "too few"),
        (["--resume"], "add --out DIR"),
        (["--resume", "--out", "empty"], "there is no training in empty to go on with"),
        (["--compare"], "nothing to compare"),
        (["--compare", "nowhere"], "there is no nowhere/train.json"),
        (["a.yaml", "b.yaml"], "one case at a time"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], words: str) -> None:
    with pytest.raises(GradveilError, match=words):
        gradveil("train", *arguments)


@pytest.mark.integration
def test_a_training_that_diverges_ends_in_one_line(tmp_path: Path) -> None:
    done = in_a_process("train", *TINY, "--lr", "1e30", "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("gradveil: round 1: no reply could be used; client 0: the local run diverged")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_model_that_diverged_is_said_to_have(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--data", "mnist-samples", "--model", "mlp:normalize=true", "--clients", "2", "--rounds", "1"]
    gradveil("train", *plan, "--lr", "1e30", "--out", "far")
    assert "the model diverged: its loss is not finite\n" in capsys.readouterr().out
    gradveil("train", *plan, "--out", "near")
    assert "diverged" not in capsys.readouterr().out


def test_how_to_go_on_is_said_only_where_there_is_something_to_go_on_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_federation: object, _number: int) -> NoReturn:
        raise KeyboardInterrupt

    gradveil("train", *TINY, "--rounds", "1", "--out", "begun")
    monkeypatch.setattr("gradveil.federated.run.Federation.round", interrupted)
    gradveil("train", *TINY, "--out", "fresh")
    assert capsys.readouterr().err == "interrupted in round 1\n"
    gradveil("train", "--rounds", "2", "--out", "begun", "--resume")
    assert capsys.readouterr().err == "interrupted; go on with gradveil train --out begun --resume\n"


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    plan = [*TINY, "--rounds", "60", "--defense", "noise:sigma=0.01", "--checkpoint-every", "3"]
    process = subprocess.Popen(command("train", *plan, "--out", "killed"), cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not Path("killed/checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert 3 <= len(json.loads(Path("killed/train.json").read_text())["rows"]) < 60
    gradveil("train", "--out", "killed", "--resume")
    gradveil("train", *plan, "--out", "unbroken")
    rows = [json.loads(Path(name, "train.json").read_text())["rows"] for name in ("killed", "unbroken")]
    assert [{**row, "seconds": 0} for row in rows[0]] == [{**row, "seconds": 0} for row in rows[1]]


@pytest.mark.integration
def test_a_tap_that_cannot_be_written_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "out/taps/round-0001-client-0000.safetensors").mkdir(parents=True)
    done = in_a_process("train", *TINY, "--rounds", "1", "--tap", "0@1", "--out", "out", cwd=tmp_path)
    said = "gradveil: cannot write out/taps/round-0001-client-0000.safetensors: Is a directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
