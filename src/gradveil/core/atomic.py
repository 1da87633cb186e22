"""Every file that Gradveil writes: whole or not at all, and for its owner alone.

After a crash there is the old content or the new one, never a part. Audits, trainings and what comes of them hold
private data, so that files are 0600 and new folders 0700, whatever the umask. A folder that was there keeps its mode.
Only the cache of public assets may be shared: with ``shared`` the umask decides, as for other programs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError

_FILE, _FOLDER = 0o600, 0o700
_RANDOM = 8 * "[0-9a-f]"
"""What the name of a file ends in while it is written, as a pattern."""
_TRIES = 1000
"""To make a folder that others make and remove."""


def write_atomically(path: Path, content: bytes, *, shared: bool = False) -> None:
    """Replace the file in one step, making its folder where needed."""
    if not path.name:
        raise GradveilError(f"cannot write {path}: it is a folder")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(open_file(temporary, os.O_WRONLY | os.O_EXCL, shared=shared), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise GradveilError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # whatever is wrong with the path was said above, and must not be hidden
            temporary.unlink(missing_ok=True)


def remove_partial(folder: Path, *names: str) -> None:
    """Remove what processes that were killed left of such files, which may be named as in ``rows/*/row.json``.

    Only for who has claimed the folder: what looks like a remainder may be a file that another process is writing.
    """
    for name in names:
        place = Path(name)
        for left in folder.glob(str(place.with_name(f".{place.name}.{_RANDOM}"))):
            with contextlib.suppress(OSError):
                left.unlink()


def write_json(path: Path, value: Any, *, shared: bool = False) -> None:
    """Write JSON that every reader takes: no NaN, no infinity."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode(), shared=shared)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing.

    Raises:
        GradveilError: if it cannot be made.
    """
    try:
        _make(folder)
    except OSError as error:
        raise GradveilError(f"cannot make the folder {folder}: {error.strerror or error}") from None


def open_file(path: Path, flags: int, *, shared: bool = False) -> int:
    """The descriptor of a file that is made where needed, with its folder: for locks and logs, which are not replaced.

    Raises:
        OSError: if it cannot be made, or if something else than a plain file of its own is in its place: a link leads
            to a file of somebody else.
    """
    if shared:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    _make(path.parent)
    odd = OSError(errno.EMLINK, f"its {path.name} is a link or no plain file; remove it")
    try:  # not blocking, because a pipe would wait; emptied only after the look
        file = os.open(path, flags & ~os.O_TRUNC | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, _FILE)
    except OSError as error:
        raise odd if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO) else error from None
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(file)
        raise odd
    with contextlib.suppress(PermissionError):  # a lock that another user made: its mode is theirs
        os.fchmod(file, _FILE)
    if flags & os.O_TRUNC:
        os.ftruncate(file, 0)
    return file


def _make(folder: Path) -> None:
    """``Path.mkdir`` gives its mode to the last folder only, and less than that under a strict umask."""
    missing = [folder]
    while missing[-1] != missing[-1].parent and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for place in reversed(missing):
        if not any(_made(place) for _ in range(_TRIES)):
            raise FileNotFoundError(errno.ENOENT, "it is removed again and again")


def _made(place: Path) -> bool:
    """Whether the folder is there now. It is not if another process had it and removed it: then try again.

    One look decides: between two of them the folder may go and come again, so that they contradict each other.
    """
    try:
        os.mkdir(place, _FOLDER)
    except OSError as error:
        try:
            found = os.lstat(place).st_mode
        except OSError as unseen:
            if isinstance(error, FileExistsError) and isinstance(unseen, FileNotFoundError):
                return False
            raise error from None
        if not stat.S_ISDIR(found) and not (stat.S_ISLNK(found) and place.is_dir()):
            raise
        return True
    try:
        os.chmod(place, _FOLDER)
    except FileNotFoundError:
        return False
    return True
