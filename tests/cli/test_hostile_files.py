"""Files that somebody prepared, or that were cut short: one line and exit 2, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer loads names that click is about to drop
    from gradveil.cli import main

Command = Callable[..., tuple[int, str, str]]
TRAIN = ["train", "--data", "mnist-samples", "--model", "mlp:hidden=8,depth=1", "--clients", "2", "--batch-size", "1"]
AUDIT = ["audit", "--data", "mnist-samples", "--model", "mlp:hidden=8,depth=1", "--attack", "ig:iterations=2",
         "--images", "1", "--gallery", "10"]  # fmt: skip


@pytest.fixture
def gradveil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gradveil", *arguments])
        with pytest.raises(SystemExit) as left:
            main.run()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value if (other := change(value)) is None else other))


def refused(done: tuple[int, str, str], *words: str) -> None:
    code, _, said = done
    last = said.splitlines()[-1]
    assert (code, last[:10]) == (2, "gradveil: "), said
    assert all(word in last for word in words), last
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "content",
    [
        "images: 2024-99-99",
        f"seed: {'9' * 5000}",
        "images: [" * 3000,
        "a: &a [x, x]\nb: &b [*a, *a]\ndefenses: [*b, *b]",
        "? {a: b}\n: c",
        "\x00",
        "data: !!python/object/apply:os.system [id]",
        'data: "a\\n\\e[2Jb"',
        "x" * 2_000_000,
        "seed: .nan",
        "restarts: 1e999",
    ],
)
@pytest.mark.parametrize("command", ["audit", "train", "sweep"])
def test_a_case_file_that_is_none(command: str, content: str, tmp_path: Path, gradveil: Command) -> None:
    (tmp_path / "case.yaml").write_text(content)
    refused(gradveil(command, "case.yaml", "--out", "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "row",
    [{}, 1, None, {"round": 1}, {"seconds": "x"}, {"bytes_up": 10**400}, {"log": {"a": "b"}}, {"dropped": None},
     {"accuracy": float("nan")}],
    ids=str,
)  # fmt: skip
def test_a_training_with_malformed_rows_is_not_resumed(row: Any, tmp_path: Path, gradveil: Command) -> None:
    gradveil(*TRAIN, "--rounds", "1", "--out", "out")
    whole = isinstance(row, dict) and row and "round" not in row
    changed(tmp_path / "out/train.json", lambda saved: saved | {"rows": [saved["rows"][0] | row if whole else row]})
    for rounds in ("1", "2"):
        refused(gradveil("train", "--out", "out", "--resume", "--rounds", rounds), "train.json: its row 1 is damaged")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "audit"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gradveil", *AUDIT, "--out", str(folder)])
        patch.setenv("GRADVEIL_OFFLINE", "1")
        patch.setenv("GRADVEIL_CACHE", str(folder.parent / "cache"))
        with pytest.raises(SystemExit):
            main.run()
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.pop("defense"),
        lambda row: row.update(defense=1),
        lambda row: row.update(identified="all"),
        lambda row: row.update(gallery=0),
        lambda row: row.update(gallery=None),
        lambda row: row.update(trace=[]),
        lambda row: row.update(per_image=[{}]),
        lambda row: row.update(digest="../../../../etc"),
        lambda row: row.update(digest="0" * 16),
        lambda row: row.update(threat="Z"),
        lambda row: row.update(attack="nobody"),
        lambda row: row.update(identified_interval=[1]),
    ],
)
def test_an_audit_with_a_malformed_row(
    change: Callable[[dict[str, Any]], Any], whole: Path, tmp_path: Path, gradveil: Command
) -> None:
    shutil.copytree(whole, tmp_path / "a")
    row = next((tmp_path / "a/rows").glob("*/row.json"))
    changed(row, lambda saved: [change(saved), saved][1])
    refused(gradveil(*AUDIT, "--out", "a", "--resume"))
    shutil.copytree(whole, tmp_path / "b")
    changed(tmp_path / "b/audit.json", lambda saved: [change(saved["rows"][0]), saved][1])
    refused(gradveil("score", "b"))


def test_weights_at_the_end_of_the_range_are_attacked_and_their_metrics_left_out(
    tmp_path: Path, gradveil: Command
) -> None:
    gradveil(*TRAIN, "--algorithm", "fedsgd", "--rounds", "1", "--tap", "0@1", "--out", "t")
    path = tmp_path / "t/taps/round-0001-client-0000.safetensors"
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = {n: torch.full_like(t, 3e35) if n.startswith("sent/") else t for n, t in load_file(path).items()}
    save_file(tensors, path, metadata=header)
    options = ["--attack", "ig:iterations=2", "--gallery", "10", "--out", "a"]
    code, _, said = gradveil("audit", "--observations", "t", *options)
    assert code == 0, said
    row = json.loads((tmp_path / "a/audit.json").read_text())["rows"][0]
    assert row["mse_r"] is None
    assert row["not_available"]["mse_r"] == "it is not finite for this model"
    assert row["psnr"] > 0


PLACES = {
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["audit.json", "truth.safetensors", "rows/*/reconstruction.safetensors"])
def test_something_else_in_the_place_of_a_file_is_not_waited_for(
    name: str, place: str, whole: Path, tmp_path: Path, gradveil: Command
) -> None:
    shutil.copytree(whole, tmp_path / "a")
    for path in list((tmp_path / "a").glob(name)):
        path.unlink()
        PLACES[place](path)
    for command in ("report", "score"):
        if (command, name) != ("score", "truth.safetensors"):  # which it does not read
            refused(gradveil(command, "a"))


def test_a_loop_of_links_for_observations_is_one_line(tmp_path: Path, gradveil: Command) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused(gradveil("audit", "--observations", "loop", "--out", "out"), "loop is no folder")
