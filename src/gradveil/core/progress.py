"""How long work tells the person who waits where it is. The command line draws it; libraries only report."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Task(Protocol):
    """One bar: how much of ``total`` is done, and a short note on the latest state."""

    def advance(self, amount: float = 1) -> None: ...

    def note(self, text: str) -> None: ...


class Progress(Protocol):
    """Where tasks are shown. ``total`` None means the end is not known."""

    def task(self, title: str, total: float | None) -> AbstractContextManager[Task]: ...


class Silent:
    """Shows nothing, as a progress and as a task: the default wherever a progress is taken."""

    def task(self, title: str, total: float | None) -> AbstractContextManager[Task]:  # noqa: ARG002
        return nullcontext(self)

    def advance(self, amount: float = 1) -> None: ...

    def note(self, text: str) -> None: ...


SILENT: Progress = Silent()
