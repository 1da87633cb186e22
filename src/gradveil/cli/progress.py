"""What a terminal shows: lines, tables, and what is running, how far it is, how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as RichTask
from rich.table import Table
from rich.text import Text

from gradveil.cli import printable, shown

_LOG_SECONDS = 10.0
_WIDE = 160


def say(line: object = "", *, err: bool = False) -> None:
    """Print a line, whatever it quotes."""
    typer.echo(shown(str(line)), err=err)


def print_table(table: Table) -> None:
    """Print a table; in a file or a pipe, which has no edge to wrap at, a wide one."""
    out = Console(soft_wrap=True, markup=False)
    (out if out.is_terminal else Console(width=_WIDE, markup=False)).print(table)


class Terminal:
    """Bars on a terminal; where the output is no terminal, a plain line every ten seconds instead."""

    def __init__(self) -> None:
        self.console = console = Console(stderr=True, soft_wrap=True, markup=False)  # names may hold brackets
        self._bars = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            _Remaining(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._open = 0

    @contextmanager
    def task(self, title: str, total: float | None) -> Iterator[_Bar]:
        if self._open == 0:
            self._bars.start()
        self._open += 1
        bar = _Bar(self, title, total)
        try:
            yield bar
        finally:
            bar.close()
            self._open -= 1
            if self._open == 0:
                self._bars.stop()


class _Bar:
    def __init__(self, terminal: Terminal, title: str, total: float | None) -> None:
        self._bars, self._console = terminal._bars, terminal.console
        self._title, self._total, self._done, self._note = shown(title), total, 0.0, ""
        self._id = self._bars.add_task(self._title, total=total, note="")
        self._started = self._told = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        self._bars.advance(self._id, amount)
        self._tell()

    def note(self, text: str) -> None:
        self._note = printable(text)
        self._bars.update(self._id, note=self._note)
        self._tell()

    def close(self) -> None:
        self._bars.remove_task(self._id)

    def _tell(self) -> None:
        now = time.monotonic()
        if self._console.is_terminal or now - self._told < _LOG_SECONDS:
            return
        self._told = now
        share = f"{self._done / self._total:4.0%}" if self._total else ""
        left = (now - self._started) * (self._total - self._done) / self._done if self._total and self._done else None
        still = "" if left is None else f", about {clock(left)} left"
        self._console.print(f"{self._title}: {share}{still}  {self._note}".rstrip(), highlight=False)


class _Remaining(ProgressColumn):
    """The time left by the average speed so far, which is steadier than that of the last moments."""

    def render(self, task: RichTask) -> Text:
        if not task.total or not task.completed or task.elapsed is None:
            return Text("estimating", style="dim")
        return Text(f"{clock(task.elapsed * (task.total - task.completed) / task.completed)} left", style="cyan")


def clock(seconds: float) -> str:
    """A time to wait, as a person reads it."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"
