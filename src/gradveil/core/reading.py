"""Reading files that a stranger may have prepared: plain ones alone, and no more of them than asked for.

A folder that somebody sends may hold a pipe, which would be waited for without end, or a link to a device that never
ends. Errors are OSErrors, as for a file that is missing, or ValueErrors: who reads knows what to say of it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST = 2**28
"""Bytes of a JSON file: an audit of 10,000 images has a tenth of this."""


def check_plain(path: Path, *, most: int | None = None) -> int:
    """The size of a plain file; an OSError if it is none, or has more bytes than ``most``. Links are followed."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    if most is not None and about.st_size > most:
        raise OSError(errno.EFBIG, f"it is too large: {about.st_size:,} bytes, at most {most:,} are read", str(path))
    return about.st_size


def read_bytes(path: Path, *, most: int = MOST) -> bytes:
    """The content of a plain file of at most so many bytes."""
    size = check_plain(path, most=most)
    # Not to be kept waiting by a pipe that took the file's place meanwhile, nor to read more than was looked at.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        return file.read(size)


def read_text(path: Path, *, most: int = MOST) -> str:
    """The same as text in UTF-8; other bytes raise a ValueError."""
    return read_bytes(path, most=most).decode()


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
