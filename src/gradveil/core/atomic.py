"""Files written whole or not at all: after a crash there is the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from gradveil.core.errors import GradveilError


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file in one step, making its folder where needed."""
    if not path.name:
        raise GradveilError(f"cannot write {path}: it is a folder")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise GradveilError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # whatever is wrong with the path was said above, and must not be hidden
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON that every reader takes: no NaN, no infinity."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())
