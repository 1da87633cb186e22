"""One sweep at a time in a folder: a lock that ends with the processes that hold it, and says what they do."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError

_PATIENCE = 10.0
"""Seconds to wait for the lock: workers of a sweep that was just killed need a moment to notice."""


class Claim:
    """A lock that is held. Forked workers hold it too, until the last of them ends."""

    def __init__(self, file: int) -> None:
        self._file = file

    def say(self, **about: Any) -> None:
        """What others can read while it is held; on a full disk, nothing."""
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), **about}).encode()
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)


@contextmanager
def claimed(folder: Path) -> Iterator[Claim]:
    """Hold the folder, or say who does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(_path(folder), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise GradveilError(f"cannot use the folder {folder}: {error.strerror}") from None
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _locked(file):
            if time.monotonic() > deadline:
                who = _said(folder)
                where = f"process {who.get('pid', 'unknown')} on {who.get('host', 'some machine')}"
                raise GradveilError(f"a sweep runs in {folder} already ({where}): wait for it, or choose another --out")
            time.sleep(0.05)
        yield Claim(file)
    finally:
        os.close(file)


def holder(folder: Path) -> dict[str, Any] | None:
    """What the sweep that runs in a folder says of itself; None if there is none."""
    try:
        file = os.open(_path(folder), os.O_RDONLY)
    except OSError:
        return None
    try:
        return None if _locked(file, fcntl.LOCK_SH) else _said(folder)  # shared: others may be looking too
    finally:
        os.close(file)


def _path(folder: Path) -> Path:
    return folder / ".lock"


def _locked(file: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _said(folder: Path) -> dict[str, Any]:
    try:
        said = json.loads(_path(folder).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
