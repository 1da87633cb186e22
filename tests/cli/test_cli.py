"""The command line as a person meets it: exit codes, one-line errors, JSON alone, interruption and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from auditing.test_audit import comparable
from gradveil.core.tensor_files import write_tensors

TINY = ["--attack", "ig:iterations=8,restarts=2", "--images", "2", "--gallery", "10"]
SLOWER = [
    "--attack",
    "ig:iterations=20,restarts=2",
    "--attack",
    "ig:iterations=150,restarts=2",
    "--images",
    "2",
    "--gallery",
    "10",
]
"""Two batches of two rows each, the second one longer, and two rows of the prior alone."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradveil.cli.main", *arguments]


def gradveil(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, cwd=cwd, check=False)


@pytest.mark.integration
def test_audit_writes_what_it_says(tmp_path: Path) -> None:
    done = gradveil("audit", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "audits").iterdir()
    assert {"audit.json", "report.html", "truth.safetensors", "observations", "rows"} <= set(os.listdir(folder))
    assert f"report: {folder.relative_to(tmp_path) / 'report.html'}" in done.stdout
    assert "prior-only" in done.stdout


@pytest.mark.integration
def test_json_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    done = gradveil("audit", *TINY, "--defense", "none", "--out", str(tmp_path / "a"), "--json")
    assert json.loads(done.stdout) == json.loads((tmp_path / "a" / "audit.json").read_text())


@pytest.mark.integration
def test_a_case_file_and_options_over_it(tmp_path: Path) -> None:
    case = tmp_path / "case.yaml"
    case.write_text("data: mnist-samples\nmodel: mlp\nimages: 3\ngallery: 10\nattacks: ['ig:iterations=2']\n")
    done = gradveil("audit", str(case), "--images", "2", "--lr", "0.5", "--out", str(tmp_path / "a"), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["case"]
    assert (said["data"], said["images"], said["recipe"]["lr"]) == ("mnist-samples", 2, 0.5)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "--attack", "igg"], "did you mean ig"),
        (["audit", "--defense", "noise:sgima=1"], "has no option 'sgima'; its options: sigma=0.1"),
        (["audit", "--attack", "ig:lr=nan"], "attack ig: lr=nan is not a finite number"),
        (["audit", "--defense", "clip:bound=1+noise:sigma=inf"], "defense noise: sigma=inf is not a finite number"),
        (["audit", "nothing.yaml"], "there is no case file nothing.yaml"),
        (["audit", "--threat", "Q"], "no threat model is called 'Q'"),
        (["audit", "--model", "no_such_package.nets:small"], "no_such_package"),
        (["audit", "--fail-above", "psnr"], "--fail-above identified=0.1"),
        (["audit", "--fail-above", "identified=50"], "a share from 0 to 1"),
        (["audit", "--fail-above", "identified=nan"], "a share from 0 to 1"),
        (["audit", "--resume"], "name it with --out"),
        (["attack", "nothing.safetensors"], "there is no file nothing.safetensors"),
        (["report", "nowhere"], "nowhere"),
        (["score", "nowhere"], "nowhere"),
        (["assets", "get", "imagenet"], "imagenet"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = gradveil(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_an_observation_is_attacked_without_the_truth(audited: Path, tmp_path: Path) -> None:
    (seen, *_) = sorted((audited / "observations").iterdir(), key=lambda path: "none" not in path.name)
    done = gradveil("attack", str(seen), "--attack", "ig:iterations=20,restarts=1", "--out", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert {"reconstruction.safetensors", "000.png", "003.png"} <= set(os.listdir(tmp_path / "r"))


@pytest.mark.integration
def test_a_broken_observation_is_one_line(audited: Path, tmp_path: Path) -> None:
    good = next((audited / "observations").iterdir()).read_bytes()
    broken = {
        "truncated": good[:-10],
        "oversized": good + b"\0" * 100,
        "renamed": (audited / "truth.safetensors").read_bytes(),
        "text": b"not a tensor in sight",
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    write_tensors(tmp_path / "nan", "observation", {"sent/w": torch.tensor([torch.nan])}, {})
    for name in (*broken, "nan"):
        done = gradveil("attack", str(tmp_path / name), "--out", str(tmp_path / "r"))
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.integration
def test_a_crossed_bound_is_exit_code_3(audited: Path, tmp_path: Path) -> None:
    del audited  # only for the order: LPIPS is at hand by now
    arguments = ["audit", "--budget", "quick", "--defense", "none", "--images", "1", "--out", str(tmp_path / "a")]
    arguments.append("--gate-none")
    crossed = gradveil(*arguments, "--fail-above", "identified=0.5")
    assert crossed.returncode == 3
    assert "identified is 1 under none, above 0.5" in crossed.stderr
    kept = gradveil(*arguments, "--resume", "--fail-above", "identified=1")
    assert kept.returncode == 0


def rows_done(folder: Path) -> list[str]:
    """The rows of the batches that are finished."""
    path = folder / "audit.json"
    return [row["digest"] for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def interrupted(folder: Path, how: signal.Signals, after_rows: int) -> int:
    """Start an audit, stop it as soon as so many rows are saved, and say how it ended."""
    process = subprocess.Popen(
        command("audit", *SLOWER, "--out", str(folder)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while len(rows_done(folder)) < after_rows and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    return process.wait(timeout=60)


@pytest.mark.integration
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "kill -9"])
def test_an_interrupted_audit_loses_at_most_the_batch_under_way(how: signal.Signals, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert gradveil("audit", *SLOWER, "--out", str(whole)).returncode == 0
    code = interrupted(parts, how, after_rows=2)
    assert code == (130 if how is signal.SIGINT else -signal.SIGKILL)
    paths = [parts / "rows" / digest / "row.json" for digest in rows_done(parts)]
    kept = {path: path.stat().st_mtime_ns for path in paths}
    assert 2 <= len(kept) < 6
    resumed = gradveil("audit", *SLOWER, "--out", str(parts), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items()), "finished rows are not run again"
    assert comparable(parts) == comparable(whole)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["attacks", "defenses", "models", "data", "assets", "threats"])
def test_list_names_everything(kind: str) -> None:
    done = gradveil("list", kind)
    assert done.returncode == 0
    assert {"attacks": "ig", "defenses": "noise", "models": "resnet18", "data": "cifar10-samples", "assets": "lpips",
            "threats": "eavesdropper"}[kind] in done.stdout  # fmt: skip


@pytest.mark.integration
def test_the_benchmark_prints_one_json_object() -> None:
    done = gradveil("bench", "throughput", "--problems", "2", "--steps", "2")
    said = json.loads(done.stdout)
    assert said["ratio"] == pytest.approx(said["problem_steps_per_s"] / said["baseline_problem_steps_per_s"], rel=0.02)


@pytest.mark.integration
def test_a_verdict_names_its_flags_and_by_choice_says_what_was_rebuilt(tmp_path: Path) -> None:
    case = ["--data", "mnist-samples", "--model", "mlp", "--images", "2", "--threat", "D", "--defense", "censor"]
    done = gradveil("audit", *case, "--attack", "analytic", "--attack", "identify", "--out", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    (verdict,) = json.loads((tmp_path / "a" / "audit.json").read_text())["verdicts"]
    assert "random defense seen once" in verdict["flags"]
    assert f"(grade {verdict['grade']})\n  Flags: {', '.join(verdict['flags'])}.\n" in done.stdout
    heads, line = done.stdout.partition("\n\n")[2].splitlines()[:2]
    assert heads.split() == ["defense", "grade", "rebuilt", "recognised", "member", "labels", "ceiling"]
    for name in ("rebuilt", "recognised"):
        share, (low, high) = verdict[name]["share"], verdict[name]["interval"]
        assert f" {share:.0%} ({100 * low:.0f} to {100 * high:.0f})" in line
    assert line.endswith("none"), "nothing is proven of censor"
    assert "\nNext: With censor, " in done.stdout


@pytest.mark.integration
def test_junit_and_costs_on_the_command_line(tmp_path: Path) -> None:
    training = ["train", "--data", "mnist-samples", "--clients", "2", "--rounds", "1", "--batch-size", "8"]
    for defense in ("none", "clip:bound=0.1"):
        done = gradveil(*training, "--defense", defense, "--out", str(tmp_path / defense))
        assert done.returncode == 0, done.stderr
    audit = ["audit", *TINY, "--defense", "none", "--defense", "clip:bound=0.1", "--out", str(tmp_path / "a")]
    costs = ["--training", str(tmp_path / "none"), "--training", str(tmp_path / "clip:bound=0.1")]
    done = gradveil(*audit, *costs, "--junit", str(tmp_path / "audit.xml"), "--fail-above", "identified=1")
    assert done.returncode == 0, done.stderr
    assert "of accuracy" in done.stdout
    verdicts = json.loads((tmp_path / "a" / "audit.json").read_text())["verdicts"]
    assert all(f"{verdict['sentence']} (grade {verdict['grade']})" in done.stdout for verdict in verdicts)
    tests = ElementTree.parse(tmp_path / "audit.xml").getroot().findall("testcase")
    assert [test.get("name") for test in tests] == ["none", "clip:bound=0.1"]
    assert not any(test.findall("failure") for test in tests), "nothing is above a bound of 1"
