"""``gradveil assets get`` and ``verify``."""

from __future__ import annotations

from typing import Annotated

import typer

from gradveil.assets import CATALOGUE, fetch, is_fetched, lookup, verify
from gradveil.cli.progress import Terminal, say
from gradveil.core.errors import GradveilError

app = typer.Typer(help="Data sets and weights: fetch and verify.", no_args_is_help=True)


@app.command()
def get(names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See: gradveil list assets.")]) -> None:
    """Fetch assets into the cache and check them against their digests; what is damaged there is fetched again."""
    for name in names:
        lookup(name)
    for name in names:
        folder = fetch(name, repair=True, progress=Terminal())
        asset = lookup(name)
        say(f"{name}: {folder}  ({asset.licence}: {asset.licence_note})")


@app.command("verify")
def check(names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="All, if none.")] = None) -> None:
    """Compare every file of fetched assets with its digest."""
    bad = 0
    for name in names or CATALOGUE:
        if not is_fetched(name):
            say(f"{name}: not fetched")
            continue
        problems = verify(name)
        bad += bool(problems)
        for line in problems or [f"{name}: good"]:
            say(line)
    if bad:
        raise GradveilError(f"{bad} asset(s) are damaged: repair them with gradveil assets get NAME")
