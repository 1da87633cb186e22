"""Locks of folders: who holds one, who waits, and what a kill leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gradveil.core import locks
from gradveil.core.atomic import make_folder, open_file, remove_partial, write_atomically
from gradveil.core.errors import GradveilError
from gradveil.core.locks import LOCK, alone, claimed, holder

HOLD = """
import sys, time
from pathlib import Path
from gradveil.core.locks import claimed
with claimed(Path(sys.argv[1])) as claim:
    claim.say(doing="nothing")
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def held_elsewhere(folder: Path, seconds: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_in_one_line_that_names_the_first(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as process:
        assert holder(tmp_path) is not None
        assert holder(tmp_path)["doing"] == "nothing"  # type: ignore[index]
        refusal = rf"^{re.escape(str(tmp_path))} is in use already \(process {process.pid} on .+\): wait for it, .+$"
        with pytest.raises(GradveilError, match=refusal), claimed(tmp_path, patience=0):
            pytest.fail("both hold it")


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / LOCK).exists()
        assert holder(tmp_path) is None
        with claimed(tmp_path, patience=0):
            assert holder(tmp_path) is not None


def test_who_waits_gets_the_folder_when_it_is_free(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path, seconds=0.3), claimed(tmp_path, patience=30):
        assert holder(tmp_path)["pid"] == os.getpid()  # type: ignore[index]


def test_who_holds_a_folder_may_claim_it_again_but_no_other_thread(tmp_path: Path) -> None:
    def other() -> None:
        with claimed(tmp_path, patience=0):
            pytest.fail("two threads hold it")

    with claimed(tmp_path), ThreadPoolExecutor() as others:
        with claimed(tmp_path):
            pass
        with pytest.raises(GradveilError, match="in use already"):
            others.submit(other).result()
    assert holder(tmp_path) is None


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path) -> None:
    with claimed(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with claimed(tmp_path / "a" / "b"):
        (tmp_path / "a" / "x").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["a", "a/x"]


def test_many_that_come_and_go_never_hold_it_together(tmp_path: Path) -> None:
    """The lock file and the folder are made and removed all the time: who locked one that is gone holds nothing."""
    inside: list[int] = []
    most = 0

    def visit(number: int) -> None:
        nonlocal most
        with claimed(tmp_path / "folder", patience=60):
            inside.append(number)
            most = max(most, len(inside))
            time.sleep(0.001)
            inside.remove(number)

    with ThreadPoolExecutor(8) as visitors:
        list(visitors.map(visit, range(60)))
    assert most == 1
    assert list(tmp_path.rglob(LOCK)) == []


def test_a_folder_that_comes_and_goes_between_two_looks_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes it at first, and makes or removes it after each look, as in the test above at times."""
    folder, mkdir, looks = tmp_path / "folder", os.mkdir, {name: getattr(os, name) for name in ("stat", "lstat")}

    def removed(path: Path, mode: int) -> None:
        monkeypatch.setattr(os, "mkdir", mkdir)
        raise FileExistsError(f"{path} was there when it was to be made with {mode}")

    def look(name: str, path: Any, **named: Any) -> os.stat_result:
        try:
            found: os.stat_result = looks[name](path, **named)
        except FileNotFoundError:
            if path == folder:
                mkdir(path)
            raise
        if path == folder:
            os.rmdir(path)
        return found

    monkeypatch.setattr(os, "mkdir", removed)
    for name in looks:
        monkeypatch.setattr(os, name, partial(look, name))
    make_folder(folder)


def test_a_link_to_nowhere_in_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(GradveilError, match=r"^cannot make the folder .*link: File exists$"):
        make_folder(tmp_path / "link")


@pytest.mark.parametrize("place", ["taken", "taken/below"])
def test_a_folder_that_cannot_be_is_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(GradveilError, match=f"^cannot use the folder .*{place}: .+$"), claimed(tmp_path / place):
        pytest.fail("held")


@pytest.mark.parametrize("kind", ["hard link", "symbolic link", "dangling link", "pipe", "folder"])
def test_what_stands_in_place_of_a_lock_is_refused_and_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "folder"
    folder.mkdir()
    if kind != "dangling link":
        other.write_text('{"pid": "somebody"}')
        other.chmod(0o644)
    if kind == "hard link":
        (folder / LOCK).hardlink_to(other)
    elif kind.endswith("link"):
        (folder / LOCK).symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(folder / LOCK)
    else:
        (folder / LOCK).mkdir()
    refusal = rf"^cannot use the folder {re.escape(str(folder))}: its \.lock is a link or no plain file; remove it$"
    with pytest.raises(GradveilError, match=refusal), claimed(folder):
        pytest.fail("held")
    assert os.path.lexists(folder / LOCK)
    if kind == "dangling link":
        assert not other.exists()
    else:
        assert (other.read_text(), other.stat().st_mode & 0o777) == ('{"pid": "somebody"}', 0o644)


def test_a_link_that_comes_while_the_lock_is_opened_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_text("content")

    def slow(path: Path, flags: int) -> int:
        path.parent.mkdir()
        path.hardlink_to(other)
        return open_file(path, flags)

    monkeypatch.setattr(locks, "open_file", slow)
    with pytest.raises(GradveilError, match="is a link or no plain file"), claimed(tmp_path / "folder"):
        pytest.fail("held")
    assert other.read_text() == "content"


def test_a_function_holds_its_folder_while_it_runs(tmp_path: Path) -> None:
    @alone
    def work(number: int, folder: Path) -> int:
        assert holder(folder) is not None
        return number + 1

    assert work(1, tmp_path) == 2
    assert work(number=2, folder=tmp_path) == 3
    assert holder(tmp_path) is None


def test_only_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    kept = ["x.json", ".x.json", ".x.json.swp", ".x.json.0123456", ".y.json.01234567", "a/b/.x.json.01234567"]
    gone = [".x.json.01234567", "a/.row.json.89abcdef"]
    for name in (*kept, *gone):
        write_atomically(tmp_path / name, b"")
    remove_partial(tmp_path, "x.json", "*/*")
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == set(kept)
