"""One process at a time writes into a folder: a lock that ends with the processes that hold it, however they end.

The lock is on the file ``.lock`` in the folder, which says who holds it and is removed when they are done. After a kill
the file stays, but nobody holds it: whoever comes next takes it over.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from gradveil.core.atomic import open_file
from gradveil.core.errors import GradveilError

P = ParamSpec("P")
R = TypeVar("R")

LOCK = ".lock"
_LARGEST = 2**20
"""Bytes of what a holder says of itself: more is not read."""
_PATIENCE = 1.0
"""Seconds to wait for a lock: a process that was just killed, or one that looks who holds it, needs a moment."""


class FolderLock:
    """A lock that is held. Forked workers hold it too, until the last of them ends."""

    def __init__(self, file: int) -> None:
        self._file = file

    def say(self, **about: Any) -> None:
        """What others can read while it is held; on a full disk, nothing."""
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), **about}).encode()
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)


_held: dict[tuple[Path, int], FolderLock] = {}
"""By folder and thread: who holds a folder may claim it again."""


@contextmanager
def claimed(folder: Path, *, patience: float | None = None) -> Iterator[FolderLock]:
    """Hold a folder, which is made where needed, and for no longer than that if nothing is written into it.

    Args:
        folder: what no other process may write into meanwhile.
        patience: seconds to wait for another process that holds it.

    Raises:
        GradveilError: if another process holds it, or if it cannot be made or written into.
    """
    key = folder.resolve(), threading.get_ident()
    if key in _held:
        yield _held[key]
        return
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    file = _acquired(folder, _PATIENCE if patience is None else patience)
    owner, _held[key] = os.getpid(), FolderLock(file)
    _held[key].say()
    try:
        yield _held[key]
    finally:
        del _held[key]
        if os.getpid() == owner:  # a forked worker that ends leaves the file to who made it
            with suppress(OSError):
                (folder / LOCK).unlink()
                for place in missing:
                    place.rmdir()  # fails, as it should, where something is in it
        os.close(file)


def alone(work: Callable[P, R]) -> Callable[P, R]:
    """Make a function claim its argument ``folder`` for as long as it runs."""
    signature = inspect.signature(work)

    @functools.wraps(work)
    def claiming(*args: P.args, **kwargs: P.kwargs) -> R:
        with claimed(signature.bind(*args, **kwargs).arguments["folder"]):
            return work(*args, **kwargs)

    return claiming


def holder(folder: Path) -> dict[str, Any] | None:
    """What the process that holds a folder says of itself; None if there is none."""
    try:
        file = os.open((folder / LOCK), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return None if _locked(file, fcntl.LOCK_SH) else _said(file)  # shared: others may be looking too
    finally:
        os.close(file)


def _acquired(folder: Path, patience: float) -> int:
    """The open and locked file. One that its last holder has removed meanwhile guards nothing: it is opened anew."""
    deadline = time.monotonic() + patience
    while True:
        try:
            file = open_file(folder / LOCK, os.O_RDWR)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and time.monotonic() < deadline:
                continue  # its last holder has just removed the empty folder
            raise GradveilError(f"cannot use the folder {folder}: {error.strerror}") from None
        if _locked(file) and _in_place(file, folder / LOCK):
            return file
        who = _said(file)
        os.close(file)
        if time.monotonic() > deadline:
            where = f"process {who.get('pid', 'unknown')} on {who.get('host', 'some machine')}"
            raise GradveilError(f"{folder} is in use already ({where}): wait for it, or choose another folder")
        time.sleep(0.05)


def _locked(file: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk that knows no locks: better unguarded than not at all
        return True
    return True


def _in_place(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _said(file: int) -> dict[str, Any]:
    try:
        said = json.loads(os.pread(file, _LARGEST, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
