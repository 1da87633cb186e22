"""The fuzzer itself: its good files load, its findings are found, and some hundred spoilt files find nothing."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_targets
import pytest
from fuzz_mutations import spoil

import fuzz

SCRIPT = Path(fuzz.__file__)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADVEIL_OFFLINE", "1")
        patch.setenv("GRADVEIL_CACHE", str(folder / "cache"))
        fuzz.make_originals(folder / "all")
    return folder / "all"


@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_what_is_not_spoilt_is_loaded(
    name: str, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    original, load = fuzz_targets.TARGETS[name]
    shutil.copytree(originals / original, tmp_path / "files")
    load(tmp_path / "files")


def test_equal_numbers_spoil_equally(originals: Path, tmp_path: Path) -> None:
    def spoilt(place: str) -> dict[str, bytes]:
        shutil.copytree(originals / "tfjs", tmp_path / place)
        spoil(tmp_path / place, random.Random("3 7"))
        return {p.name: p.read_bytes() for p in (tmp_path / place).iterdir() if p.is_file()}

    assert spoilt("a") == spoilt("b") != {p.name: p.read_bytes() for p in (originals / "tfjs").iterdir()}


def busy(_folder: Path) -> None:
    while True:
        pass


BAD: dict[str, Callable[[Path], Any]] = {
    "KeyError": lambda _folder: {}["x"],
    "MemoryError": lambda _folder: bytearray(8 * 2**30),
    "the process ended with 3": lambda _folder: os._exit(3),
    "hangs": busy,
    "hangs: no sign of life": lambda _folder: [time.sleep(0.01) for _ in iter(int, 1)],
}


@pytest.mark.integration
@pytest.mark.parametrize("what", BAD)
def test_a_loader_that_misbehaves_is_found_and_the_next_file_is_tried(
    what: str, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 1 if what == "hangs" else 1000)
    monkeypatch.setattr(fuzz, "PATIENCE", 2 if "life" in what else 1000)
    monkeypatch.setattr(fuzz_targets, "TARGETS", {"bad": ("tfjs", BAD[what])})
    worker = fuzz.Worker(0, originals, tmp_path / "worker" / "files")
    try:
        for number in (0, 1):
            worker.give(number)
            found = worker.result()
            assert found is not None
            assert found.what.startswith(what.partition(":")[0])
        monkeypatch.setattr(fuzz_targets, "TARGETS", {"good": ("tfjs", lambda _folder: None)})
        worker.stop()
        worker.give(2)
        assert worker.result() is None
    finally:
        worker.stop()


@pytest.mark.integration
def test_some_hundred_spoilt_files_find_nothing(tmp_path: Path) -> None:
    """The short form of ``make fuzz``, in a process of its own: it forks, and limits its memory."""
    seed = "1"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "300", "--first", "1", "--workers", "1", "--seed", seed],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
    assert "300 files" in done.stdout
