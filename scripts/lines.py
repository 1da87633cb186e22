"""Progress of an audit as plain lines, for machines without a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lines:
    """Progress as lines on standard output: what took longer than a second, and every row once it is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, time.perf_counter()
        self.printed: set[str] = set()

    @contextmanager
    def task(self, title: str, total: float | None) -> Iterator[Lines]:  # noqa: ARG002
        started = time.perf_counter()
        yield self if title == "audit" else _Part(self.folder)
        seconds = time.perf_counter() - started
        if seconds > 1:
            self._say(f"{seconds:7.1f} s for {title}")

    def advance(self, amount: float = 1) -> None:  # noqa: ARG002
        """Rows are saved before the audit says that it is further."""
        if not (self.folder / "audit.json").exists():
            return
        for row in json.loads((self.folder / "audit.json").read_text())["rows"]:
            if row["digest"] not in self.printed:
                self.printed.add(row["digest"])
                attack = f"{row['prior_of']} without the update" if row["prior_of"] else row["attack"]
                found = f"{row['identified']:4.0%} identified, {row['psnr']:4.1f} dB"
                self._say(f"{row['seconds']:7.1f} s  {row['defense']:30} {found}  {attack} ({row['strategy']})")

    def note(self, text: str) -> None:
        self._say(f"          {text}")

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.started:7.0f}  {text}", flush=True)


class _Part(Lines):
    """A part of the audit, such as a search: it advances thousands of times, and no row is saved meanwhile."""

    def advance(self, amount: float = 1) -> None:
        pass
