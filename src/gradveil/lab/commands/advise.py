"""``gradveil advise``: which defense to use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gradveil.cli import shown
from gradveil.cli.options import checked_device, options_from
from gradveil.cli.progress import Terminal, print_table, say
from gradveil.core.errors import GradveilError
from gradveil.core.fields import Json
from gradveil.core.locks import claimed
from gradveil.lab.advise import Question, render_advice
from gradveil.lab.advise.answer import Recommendation, told
from gradveil.lab.advise.page import COLUMNS, nearest, rows
from gradveil.lab.advise.search import advise as search


@options_from(Question)
def advise(
    given: Json,
    out: Annotated[
        Path | None, typer.Option(help="Folder for trials and the page; default: advice/ and the time.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the advice in --out; wishes may change.")
    ] = False,
) -> None:
    """Try defenses by short audits and trainings, and say which one keeps two wishes, with the command to run it."""
    if resume and out is None:
        raise GradveilError("--resume goes on with the advice of a folder: name it with --out")
    folder = out or Path("advice") / time.strftime("%Y%m%d-%H%M%S")
    asked = Question(**{**given, "device": checked_device(given.get("device"))})
    with claimed(folder):
        try:
            found, shortened = search(asked, folder, resume=resume, progress=Terminal())
        except KeyboardInterrupt:
            say(f"interrupted; finished trials are kept: the same command with --out {folder} --resume", err=True)
            raise typer.Exit(130) from None
        page = render_advice(asked, found, shortened, folder / "advice.html")
    _print(asked, found, shortened)
    say(f"page: {page}")


def _print(asked: Question, found: Recommendation, shortened: str) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for place, title in enumerate(COLUMNS):
        table.add_column(title, overflow="fold", justify="right" if 2 <= place <= 6 else "left")
    for _, cells in rows(asked, found):
        table.add_row(*map(shown, cells))
    print_table(table)
    say()
    say(f"Shortened: {shortened}.")
    say()
    say(found.sentence)
    for name, trial in nearest(found):
        if trial is not None:
            say(f"{name}: {told(asked, found, trial)}.")
    if found.command:
        say(f"  {found.command}")
        say(f"  {found.audit}")
