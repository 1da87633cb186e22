"""``gradveil sweep``: the cases of a study on workers or on a cluster, and where they stand."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradveil.cli.progress import clock, print_table, say
from gradveil.core.errors import GradveilError
from gradveil.lab.sweeps import Start, Status, read_study, run_study, status_of

FAILED = 1

_SWEEPS = Path("sweeps")
_PLAIN_SECONDS = 10.0
_SHOWN = 8


def sweep(
    study_file: Annotated[Path | None, typer.Argument(metavar="[STUDY.yaml]", help="A study: base and grid.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes on this machine; default: as many as its cores allow, with a GPU 1.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on this Ray cluster, as HOST:PORT or auto; or local.")
    ] = None,
    gpus: Annotated[float, typer.Option(help="Share of a GPU that a case on one takes of a Ray cluster.")] = 1.0,
    part: Annotated[
        str, typer.Option(metavar="K/N", help="Only the k-th of n parts, to share a study among machines.")
    ] = "1/1",
    retry: Annotated[bool, typer.Option("--retry", help="Run cases again that failed before.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder; default: sweeps/ and the name of the study.")] = None,
    status: Annotated[bool, typer.Option("--status", help="Say where the sweep stands, and run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Run every case of a study that is not done yet; each gets a folder, named by its digest, with result.json."""
    if status:
        _print_status(_folders(study_file, out), as_json)
        return
    if study_file is None:
        raise GradveilError("name a study to run: gradveil sweep STUDY.yaml; --status shows those in sweeps/")
    study, folder = read_study(study_file), out or _SWEEPS / study_file.stem
    count = workers if workers is not None else (1 if study.on_gpu else max(1, (os.cpu_count() or 1) // study.threads))
    number, _, of = part.partition("/")
    if not number.isdecimal() or not of.isdecimal():
        raise GradveilError(f"cannot read the part {part!r}; write --part 1/2")
    try:
        with Board(folder) as board:
            end = run_study(
                study, folder, workers=count, ray=ray, gpus=gpus, retry=retry, part=(int(number), int(of)),
                start=start_of_workers(study.on_gpu), report=board.show,
            )  # fmt: skip
    except KeyboardInterrupt:
        say(f"interrupted; what is done is kept: go on with gradveil sweep {study_file} --out {folder}", err=True)
        raise typer.Exit(130) from None
    if as_json:
        say(json.dumps({"folder": str(folder), **end.as_json()}))
    else:
        say(f"{end.done} of {end.total} cases done, {len(end.failed)} failed: {folder}")
        _print_failures(end)
        if end.failed:
            say("logs are beside each failed.json; --retry runs these cases again", err=True)
    if end.failed:
        raise typer.Exit(FAILED)


def start_of_workers(on_gpu: bool) -> Start:
    """How workers start. This process only looks on: one that has started no threads can be forked."""
    torch.set_num_threads(1)
    return "fork" if sys.platform == "linux" and not on_gpu else "spawn"


class Board:
    """A table that is kept up to date on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._printed = folder, 0.0
        console = Console(stderr=True, soft_wrap=True)
        # Without a thread of its own: workers are forked while it is shown.
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, now: Status) -> None:
        if self._live is not None:
            self._live.update(_table({self._folder: now}, now.running), refresh=True)
        elif time.monotonic() - self._printed > _PLAIN_SECONDS:
            self._printed = time.monotonic()
            rest = "" if now.estimate is None else f", about {clock(now.estimate)} left"
            counts = f"{len(now.running)} running, {len(now.failed)} failed, {now.left} left"
            say(f"{now.done} of {now.total} done, {counts}{rest}", err=True)


def _table(sweeps: dict[Path, Status], running: dict[str, float] | None = None) -> Table:
    lines = [f"{title}  {clock(seconds)}" for title, seconds in (running or {}).items()]
    lines = lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]
    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        caption=Text("\n".join(lines), style="dim"),
        caption_justify="left",
    )
    table.add_column("sweep", overflow="fold")
    for title in ("cases", "done", "running", "failed", "left", "seconds per case", "time left"):
        table.add_column(title, justify="right")
    for folder, now in sweeps.items():
        each = "n/a" if now.seconds_per_case is None else f"{now.seconds_per_case:.1f}"
        rest = "n/a" if now.estimate is None else clock(now.estimate)
        counts = map(str, (now.total, now.done, len(now.running), len(now.failed), now.left))
        table.add_row(Text(str(folder)), *counts, each, rest)
    return table


def _print_status(folders: list[Path], as_json: bool) -> None:
    sweeps = {folder: status_of(folder) for folder in folders}
    if as_json:
        say(json.dumps([{"folder": str(folder), **now.as_json()} for folder, now in sweeps.items()]))
        return
    print_table(_table(sweeps))
    for now in sweeps.values():
        _print_failures(now)


def _print_failures(now: Status) -> None:
    for title, reason in now.failed.items():
        say(f"failed: {title}: {reason}")


def _folders(study_file: Path | None, out: Path | None) -> list[Path]:
    """The sweeps that are asked about: that of a study, that in a folder, or all in sweeps/."""
    if out is not None:
        return [out]
    if study_file is not None:
        return [study_file if study_file.is_dir() else _SWEEPS / study_file.stem]
    found = sorted(path.parent for path in _SWEEPS.glob("*/study.json"))
    if not found:
        raise GradveilError("there is no sweep in sweeps/: name one with --out DIR")
    return found
