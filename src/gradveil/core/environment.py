"""What numbers depend on besides what was asked for, and where they come from."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

import gradveil
from gradveil import __version__
from gradveil.core.types import Json


def environment(device: str) -> Json:
    """Versions and the machine, as results carry them."""
    return {
        "gradveil": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def is_environment(value: object) -> bool:
    """Whether a value from a file has what :func:`environment` gives."""
    texts = ("gradveil", "python", "torch", "device")
    whole = isinstance(value, dict) and all(isinstance(value.get(name), str) for name in texts)
    return whole and type(value.get("threads")) is int  # type: ignore[attr-defined]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@cache
def source_commit() -> str | None:
    """The commit of the git checkout that this Gradveil runs from, with "-dirty" where files of it were changed.

    None where it was installed otherwise. A checkout around an installed package is another project's.
    """
    root = Path(gradveil.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    # Inside a git hook these variables name the repository of the hook.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    asked = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, env=outside, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def typed(arguments: Sequence[str]) -> str:
    """A command line of Gradveil as one would type it, without the name of the home folder.

    >>> typed(["audit", "--out", f"{Path.home()}/a", "--defense", "noise:sigma=0.1", "--data", "x y"])
    "gradveil audit --out ~/a --defense noise:sigma=0.1 --data 'x y'"
    """
    return without_home(shlex.join(["gradveil", *arguments]))


def without_home(text: str) -> str:
    """A text in which the home folder, which tells who somebody is, stands as ~."""
    home = str(Path.home()).rstrip("/")
    return re.sub(rf"{re.escape(home)}(?=[/\s'\",+)]|$)", "~", text) if home else text
