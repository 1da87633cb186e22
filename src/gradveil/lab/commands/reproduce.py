"""``gradveil reproduce``: a table or figure of a paper, with ours beside it on a page."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from gradveil.cli.progress import print_table, say
from gradveil.core.atomic import write_atomically
from gradveil.core.errors import GradveilError
from gradveil.lab.commands.sweep import Board, start_of_workers
from gradveil.lab.reproduce import ReproductionPlan, page, plan, reproduction, reproductions, run_plan

_FOLDER = Path("reproductions")


class Size(StrEnum):
    """How much of it."""

    SMALL = "small"
    PAPER = "paper"


class SettingsOf(StrEnum):
    """What the text says, or what the authors' code does."""

    PAPER = "paper"
    RELEASE = "release"


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Such as censor-1; --list shows all.")] = None,
    scale: Annotated[
        Size | None, typer.Option(help="small: ten minutes of two cores; paper: for a GPU. Default: small.")
    ] = None,
    settings: Annotated[
        SettingsOf | None,
        typer.Option(help="At the scale paper, what the text says or what the authors' code does. Default: paper."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD=DATA", help="Data that you bring, as ImageNet=imagenet:path=FOLDER. May be repeated."
        ),
    ] = None,
    generator: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD=GENERATOR", help="Generator for data that you bring. May be repeated."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Default: cpu at the scale small, cuda at the scale paper.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on this machine; default: as many as it has cores, with a GPU 1."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default: reproductions/NAME-SCALE.")] = None,
    page_file: Annotated[
        Path | None, typer.Option("--page", help="File of the page; default: page.md in --out.")
    ] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="--no-run: only write the page of what is done.")] = True,
    show: Annotated[bool, typer.Option("--list", help="Show all names, and what each takes.")] = False,
) -> None:
    """Run a table or figure of a paper, and write a page with the paper's figures beside ours. Done cases are kept."""
    if show:
        _print_names()
        return
    if name is None:
        raise GradveilError("name a reproduction, such as censor-1; gradveil reproduce --list shows all")
    if scale is Size.SMALL and settings is not None:
        raise GradveilError("--settings is of the scale paper: leave out --scale small")
    small = scale is not Size.PAPER and settings is None
    chosen = device or ("cpu" if small else "cuda")
    if chosen not in ("cpu", "cuda"):
        raise GradveilError(f"the device is cpu or cuda, not {chosen!r}")
    planned = plan(
        reproduction(name),
        "small" if small else (settings or SettingsOf.PAPER).value,
        device=chosen,
        data=_brought("data", data),
        generators=_brought("generator", generator),
    )
    _check(planned, run)
    folder = out or _FOLDER / planned.folder
    if run:
        on_gpu = chosen == "cuda"
        count, start = workers or (1 if on_gpu else os.cpu_count() or 1), start_of_workers(on_gpu)
        try:
            with Board(folder) as board:
                run_plan(planned, folder, workers=count, start=start, report=board.show)
        except KeyboardInterrupt:
            say("interrupted; what is done is kept: the same command goes on from there", err=True)
            raise typer.Exit(130) from None
    target = page_file or folder / "page.md"
    write_atomically(target, page(planned, folder).encode())
    say(target)


def _check(planned: ReproductionPlan, run: bool) -> None:
    if planned.cases == 0:
        bring = " or ".join(f"--data '{word}={how}'" for word, how in planned.missing().items())
        name = planned.reproduction.name
        raise GradveilError(f"{name} cannot run at the scale {planned.scale} with the data at hand: add {bring}")
    if run and planned.device == "cuda" and not torch.cuda.is_available():
        raise GradveilError(
            f"{planned.reproduction.name} at the scale {planned.scale} is for a GPU, and torch sees none here: "
            "add --scale small, or --device cpu and much time"
        )


def _brought(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = [text.partition("=") for text in given or []]
    for word, equals, spec in pairs:
        if not word or not spec:
            text = f"{word}{equals}{spec}"
            raise GradveilError(
                f"cannot read --{option} {text!r}; write WORD=NAME, such as ImageNet=imagenet:path=FOLDER"
            )
    return {word: spec for word, _, spec in pairs}


def _print_names() -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("name", "in the paper", "small", "paper", "what it is"):
        table.add_column(title, overflow="fold", no_wrap=title != "what it is")
    for name, one in reproductions().items():
        costs = []
        for scale in Size:
            cases = plan(one, scale.value).cases
            costs.append(f"{cases} cases, {one.minutes[scale.value]} min" if cases else "needs your data")
        table.add_row(name, one.where, *costs, one.about)
    print_table(table)
    say("small: minutes of two cores; paper: minutes of one H200, estimated.")
