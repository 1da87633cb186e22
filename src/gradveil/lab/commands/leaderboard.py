"""``gradveil leaderboard``: defenses on the settings of the leaderboard, and its page."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradveil.cli.device import checked_device
from gradveil.cli.progress import Terminal
from gradveil.core.errors import GradveilError
from gradveil.defenses import DEFENSES
from gradveil.lab.leaderboard import SHOWN, enter, render_leaderboard, settings_named


def leaderboard(
    defenses: Annotated[
        list[str] | None, typer.Argument(metavar="[DEFENSE]...", help="Measure these, such as noise:sigma=0.1.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Measure all defenses that the leaderboard shows.")] = False,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only in this setting, such as 'mnist-*'. Repeatable.")
    ] = None,
    load: Annotated[
        list[Path] | None, typer.Option(metavar="FILE.py", help="Run this file first: it registers a defense.")
    ] = None,
    training: Annotated[bool, typer.Option(help="Measure accuracy and time too.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by itself cuda where there is one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the leaderboard.")] = Path("docs/leaderboard"),
    work: Annotated[Path, typer.Option(help="Folder for audits and trainings, which are large.")] = Path(
        "out/leaderboard"
    ),
) -> None:
    """Enter defenses into the leaderboard, or only write its page anew; run again, it goes on where it stopped."""
    for path in load or []:
        _load(path)
    chosen = list(SHOWN) if every else list(defenses or [])
    for spec in chosen:
        DEFENSES.build(spec)
    where, settings = checked_device(device), settings_named(setting or [])
    progress = Terminal(Console(stderr=True, soft_wrap=True))
    for one in settings if chosen else []:
        typer.echo(f"{one.name}: {one.title}", err=True)
        for path in enter(one, chosen, out, work, device=where, train=training, progress=progress):
            render_leaderboard(out)
            typer.echo(f"entered {path}", err=True)
    typer.echo(f"leaderboard: {render_leaderboard(out)}")


def _load(path: Path) -> None:
    """Run a person's own file, so that what it registers has a name here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None or spec.origin is None:
        raise GradveilError(f"{path} is not a Python file: --load takes one that registers a defense")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == spec.origin]
        line = lines[-1] if lines else None  # of the file, that the error came from or through
        if isinstance(error, SyntaxError) and error.filename == spec.origin:
            line = error.lineno
        place = f"{path}, line {line}: {type(error).__name__}"
        raise GradveilError(f"{place}: {message}".removesuffix(": ")) from error
