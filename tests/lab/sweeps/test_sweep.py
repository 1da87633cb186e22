"""Sweeps on this machine: what they leave, what they skip, and what does not stop them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradveil.auditing import Case, run_case
from gradveil.cli.main import app
from gradveil.core import locks
from gradveil.core.errors import GradveilError
from gradveil.core.plugins import Plugin
from gradveil.federated import Training, run_training
from gradveil.lab.sweeps import ResultFolder, Status, batches_of, make_study, read_study, run_study, status_of
from gradveil.lab.sweeps.work import attempt
from gradveil.report import render
from lab.sweeps.sweeps import BASE, CRASHING, alive, children, of_seeds, results, sweep, sweeping, until, written

STUDY = of_seeds(3)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def under_way(out: Path) -> Status | None:
    """Where a sweep stands, once cases are done and others run: between two batches nothing runs for a moment."""
    now = status_of(out) if (out / "study.json").exists() else None
    return now if now and now.done and now.running else None


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken sweep of twelve cases by one worker."""
    folder = tmp_path_factory.mktemp("swept")
    done = sweep(written(folder, STUDY), "--out", folder / "out", "--workers", 1, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["total"], said["done"], said["failed"], said["left"]) == (12, 12, {}, 0)
    return folder / "out"


@pytest.mark.integration
def test_every_case_has_the_folder_of_an_audit_and_a_result(swept: Path) -> None:
    for entry in make_study("study", STUDY).entries:
        folder = swept / entry.digest
        result, audit = (read(folder / name) for name in ("result.json", "audit.json"))
        assert result["case"] == entry.case.as_json()
        assert {row["defense"] for row in result["rows"]} == set(entry.case.defenses)  # type: ignore[union-attr]
        assert [row["psnr"] for row in result["rows"]] == [row["psnr"] for row in audit["rows"]]
        assert "seconds" not in result["rows"][0]
        assert all((folder / path).is_file() for row in audit["rows"] for path in row["files"].values() if path)
        assert result["environment"]["threads"] == 1
    assert "picked out of" in render(folder).read_text()


@pytest.mark.integration
def test_a_case_in_company_is_the_case_alone_but_for_the_last_digits(swept: Path, tmp_path: Path) -> None:
    entry = make_study("study", STUDY).entries[1]
    assert isinstance(entry.case, Case)
    alone = run_case(entry.case, tmp_path / "alone").as_json()
    together = read(swept / entry.digest / "audit.json")
    for name in ("case", "left_out", "complete"):
        assert together[name] == alone[name]
    for one, other in zip(together["rows"], alone["rows"], strict=True):
        assert one.keys() == other.keys()
        same = ("digest", "defense", "attack", "prior_of", "files", "log", "randomized", "flags", "assumptions")
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
        assert one["psnr"] == pytest.approx(other["psnr"], rel=1e-4)
        assert one["objective"] == pytest.approx(other["objective"], rel=1e-3)
    assert "16 together" in together["rows"][0]["strategy"] or together["rows"][0]["strategy"].startswith("loop")


@pytest.mark.integration
def test_killed_and_with_two_workers_it_ends_the_same(swept: Path, tmp_path: Path) -> None:
    study, out = written(tmp_path, STUDY), tmp_path / "out"
    with sweeping(study, "--out", out, "--workers", 2) as process:
        assert until(lambda: len(results(out)) > 1)
        workers = children(process.pid)
    assert until(lambda: not any(map(alive, workers)), 10), "they end with who gives them work"
    assert len(results(out)) < 12
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    assert sweep(study, "--out", out, "--workers", 2).returncode == 0
    assert results(out) == results(swept)
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items()), "what is done is not done again"


@pytest.mark.integration
def test_an_interrupted_sweep_says_how_to_go_on_and_its_status_can_be_read_meanwhile(tmp_path: Path) -> None:
    study, out = written(tmp_path, of_seeds(20)), tmp_path / "out"
    with sweeping(study, "--out", out, "--workers", 1) as process:
        now = until(lambda: under_way(out))
        workers = children(process.pid)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert now is not None, "no look at it found cases done and cases running"
    assert now.done + len(now.running) + now.left == now.total == 80
    assert len(now.running) <= 4
    assert now.estimate is not None
    assert process.returncode == 130
    assert f"go on with gradveil sweep {study}" in said
    assert not any(map(alive, workers))
    assert status_of(out).running == {}


@pytest.mark.integration
def test_a_case_that_crashes_or_cannot_run_stops_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing_nets.py").write_text(CRASHING)
    monkeypatch.syspath_prepend(tmp_path)
    models = [f"crashing_nets:{name}" for name in ("killed", "falls", "raises")]
    fields = {"base": {**BASE, "defenses": ["none"]}, "grid": {"model": [models[0], "mlp", *models[1:]]}}
    study, out, own = written(tmp_path, fields), tmp_path / "out", ["--load", "crashing_nets"]
    refused = CliRunner().invoke(app, ["sweep", str(study), "--out", str(out)])
    assert "add --load crashing_nets" in str(refused.exception), "a study runs no code that nobody loaded"
    done = CliRunner().invoke(app, ["sweep", str(study), "--out", str(out), "--workers", "2", *own])
    assert done.exit_code == 1
    assert "1 of 4 cases done, 3 failed" in done.output
    failures = {failure["title"]: failure for failure in map(read, out.glob("*/failed.json"))}
    killed, falls, raises = (failures[f"model={model}"] for model in models)
    assert killed["reason"] == "the process that ran it was killed by SIGKILL"
    assert falls["reason"] == "the process that ran it was killed by SIGSEGV"
    assert "Segmentation fault" in (out / falls["digest"] / "log.txt").read_text()
    assert "no such luck" in raises["reason"]
    assert "Traceback" in (out / raises["digest"] / "log.txt").read_text()
    monkeypatch.setenv("LUCK", "good")
    assert run_study(read_study(study), out, start="fork").done == 1, "it failed before, and is not asked to run again"
    again = run_study(read_study(study), out, retry=True, start="fork")
    assert again.done == 2
    assert sorted(again.failed) == sorted(f"model={model}" for model in models[:2])
    assert not (out / raises["digest"] / "failed.json").exists()


def test_code_that_a_worker_cannot_load_fails_the_case_in_one_line(tmp_path: Path) -> None:
    (batch,) = batches_of(make_study("test", {"base": BASE}))
    outcome = attempt(batch, tmp_path, 1, [Plugin("no_such_package_anywhere")])
    assert outcome.how == "failed"
    assert outcome.reason.startswith("cannot import 'no_such_package_anywhere'")
    torn = Plugin("torn_file", "torn_file.py", "x = 1\nraise ValueError('of mine')\n")
    assert attempt(batch, tmp_path, 1, [torn]).reason == "torn_file.py, line 2: ValueError: of mine"


@pytest.mark.integration
def test_company_is_parted_where_one_case_cannot_run(tmp_path: Path) -> None:
    """Soteria is told a layer that the model does not have; the others are then run by themselves."""
    fields = {"base": BASE, "grid": {"defenses": ["none", "soteria:layer=nowhere", "clip:bound=1"]}}
    study = make_study("test", fields)
    assert len(batches_of(study)) == 1
    end = run_study(study, tmp_path, start="fork")
    assert (end.done, end.left) == (2, 0)
    assert list(end.failed) == ["defenses=soteria:layer=nowhere"]
    for path in tmp_path.glob("*/result.json"):
        assert read(path)["together"] == [path.parent.name]
    assert not list((tmp_path / ".work").glob("*/rows")), "what was begun together is dropped"
    assert run_study(study, tmp_path, retry=True, start="fork").done == 2


@pytest.mark.integration
def test_results_of_several_machines_are_merged_by_copying_folders(swept: Path, tmp_path: Path) -> None:
    study = make_study("study", STUDY)
    parts = [tmp_path / "one", tmp_path / "two"]
    ended = [run_study(study, folder, part=(k + 1, 2), start="fork") for k, folder in enumerate(parts)]
    assert [status.done for status in ended] == [8, 4]
    for folder in parts[1].glob("*/"):
        shutil.copytree(folder, parts[0] / folder.name, dirs_exist_ok=True)
    assert run_study(study, parts[0]).done == 12
    assert results(parts[0]) == results(swept)


@pytest.mark.integration
def test_a_result_that_is_damaged_is_run_again(swept: Path, tmp_path: Path) -> None:
    shutil.copytree(swept, tmp_path / "out")
    digest = make_study("study", STUDY).entries[5].digest
    (tmp_path / "out" / digest / "result.json").write_text("{")
    assert status_of(tmp_path / "out").left == 1
    assert run_study(make_study("study", STUDY), tmp_path / "out", start="fork").done == 12
    assert results(tmp_path / "out") == results(swept)


def test_trainings_are_swept_too_and_go_on_from_their_last_round(tmp_path: Path) -> None:
    base = {"data": "mnist-samples", "model": "mlp", "clients": 2, "rounds": 3, "batch_size": 8}
    study = make_study("test", {"kind": "training", "base": base, "grid": {"defense": ["none", "clip:bound=1"]}})
    whole, broken = ResultFolder(tmp_path / "whole"), ResultFolder(tmp_path / "broken")

    def seconds(path: Path) -> float:
        return float(read(path)["rows"][0]["seconds"])

    assert run_study(study, whole.folder, start="fork").done == 2
    for batch in batches_of(study):
        (entry,) = batch.entries
        assert isinstance(entry.case, Training)
        run_training(entry.case.model_copy(update={"rounds": 1}), broken.work(batch))
    begun = {seconds(path) for path in broken.folder.glob(".work/*/train.json")}
    assert run_study(study, broken.folder, start="fork").done == 2
    assert {seconds(path) for path in broken.folder.glob("*/train.json")} == begun, "the first round was not run again"
    for entry in study.entries:
        result = whole.result(entry.digest)
        assert result is not None
        assert [row["round"] for row in result["rows"]] == [1, 2, 3]
        assert "seconds" not in result["rows"][0]
        assert (whole.case(entry.digest) / "checkpoint.safetensors").is_file()
    assert results(broken.folder) == results(whole.folder)


def test_the_estimate_is_what_is_left_at_the_speed_so_far() -> None:
    now = Status(total=10, done=4, running={"a": 1.5, "b": 9.0}, failed={}, left=4, seconds_per_case=2.0, workers=2)
    assert now.estimate == (4 * 2.0 + (2.0 - 1.5) + 0.0) / 2
    assert replace(now, seconds_per_case=None).estimate is None


def test_two_sweeps_do_not_run_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.lab.sweeps.run._PATIENCE", 0.1)
    with locks.claimed(tmp_path), ThreadPoolExecutor() as others:
        second = others.submit(run_study, make_study("study", STUDY), tmp_path)
        with pytest.raises(GradveilError, match=rf"already \(process {os.getpid()} on "):
            second.result()
    assert locks.holder(tmp_path) is None


def test_what_a_kill_left_of_cases_that_are_done_is_removed(swept: Path, tmp_path: Path) -> None:
    out, study = shutil.copytree(swept, tmp_path / "out"), make_study("study", STUDY)
    first, *_ = batches_of(study)
    for left in (
        ResultFolder(out).work(first),
        ResultFolder(out).work(first.apart()[0]),
        out / ".work" / "of-another-study",
    ):
        left.mkdir(parents=True)
    (out / ".study.json.0123abcd").touch()
    assert run_study(study, out).done == len(study.entries)
    assert os.listdir(out / ".work") == ["of-another-study"]
    assert not (out / ".study.json.0123abcd").exists()


def test_who_looks_for_a_sweep_is_not_taken_for_one_by_others_who_look(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"running": ["a"]}')  # as a kill leaves it
    looks: list[object] = []

    def looked(file: int, how: int = fcntl.LOCK_EX, locked: Any = locks._locked) -> bool:
        free: bool = locked(file, how)
        if not looks:  # another looks while this one holds what it looked with
            looks.append(free)
            looks.append(locks.holder(tmp_path))
        return free

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(locks, "_locked", looked)
        assert locks.holder(tmp_path) is None
    assert looks == [True, None]


@pytest.mark.integration
def test_status_shows_the_sweeps_of_a_folder(swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "study").symlink_to(swept)
    shown = CliRunner().invoke(app, ["sweep", "--status"]).output
    assert shown.splitlines()[1].split()[:6] == ["sweeps/study", "12", "12", "0", "0", "0"]
    said = json.loads(CliRunner().invoke(app, ["sweep", "study.yaml", "--status", "--json"]).output)
    assert said[0]["done"] == said[0]["total"] == 12
    with pytest.raises(GradveilError, match="holds no sweep"):
        CliRunner().invoke(app, ["sweep", "--status", "--out", "nothing"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name a study"),
        (["missing.yaml"], "no study file missing.yaml"),
        (["STUDY", "--workers", "0"], "at least one worker"),
        (["STUDY", "--part", "3/2"], "part K/N"),
        (["STUDY", "--part", "half"], "write --part 1/2"),
        (["STUDY", "--ray", "127.0.0.1:1"], "no Ray cluster answers"),
        (["STUDY", "--ray", "local", "--gpus", "0"], "a share of one GPU, from 0.0001 to 1, or a whole number; not 0"),
        (["STUDY", "--ray", "local", "--gpus", "1.5"], "or a whole number; not 1.5"),
        (["STUDY", "--ray", "local", "--gpus", "nan"], "or a whole number; not nan"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    study = str(written(tmp_path, STUDY))
    given = ["sweep", *(study if one == "STUDY" else one for one in arguments), "--out", str(tmp_path / "out")]
    with pytest.raises(GradveilError, match=complaint) as caught:
        CliRunner().invoke(app, given, catch_exceptions=False)
    assert "\n" not in str(caught.value)
