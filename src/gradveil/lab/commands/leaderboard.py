"""``gradveil leaderboard``: defenses on the settings of the leaderboard, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.cli.options import admit, checked_device
from gradveil.cli.progress import Terminal, say
from gradveil.defenses import DEFENSES
from gradveil.lab.leaderboard import enter, render_leaderboard, settings_named


def leaderboard(
    defenses: Annotated[
        list[str] | None, typer.Argument(metavar="[DEFENSE]...", help="Measure these, such as noise:sigma=0.1.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Measure all defenses that the leaderboard shows.")] = False,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only in this setting, such as 'sum-*'. Repeatable.")
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="Run this attack instead, and add it to what entries have. Repeatable.")
    ] = None,
    training: Annotated[bool, typer.Option(help="Measure accuracy and time too.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the leaderboard.")] = Path("docs/leaderboard"),
    work: Annotated[Path, typer.Option(help="Folder for audits and trainings, which are large.")] = Path(
        "out/leaderboard"
    ),
) -> None:
    """Enter defenses into the leaderboard, or only write its page anew; run again, it goes on where it stopped."""
    own = list(defenses or [])
    admit({"defenses": own, "attacks": list(attack or [])})
    for spec in own:
        DEFENSES.build(spec)
    for spec in attack or []:
        ATTACKS.build(spec, BUDGETS["standard"])
    where, settings = checked_device(device), settings_named(setting or [])
    progress = Terminal()
    for one in settings:
        chosen = list(one.shown) if every else own
        if not chosen:
            continue
        say(f"{one.name}: {one.title}", err=True)
        for path in enter(
            one, chosen, out, work, device=where, attacks=attack or (), train_too=training, progress=progress
        ):
            render_leaderboard(out)
            say(f"entered {path}", err=True)
    say(f"leaderboard: {render_leaderboard(out)}")
