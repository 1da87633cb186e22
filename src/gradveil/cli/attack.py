"""``gradveil attack``: an update captured elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gradveil.attacks import ATTACKS, BUDGETS, save_reconstructions
from gradveil.cli.progress import Terminal, say
from gradveil.core.atomic import make_folder, write_atomically
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import derive
from gradveil.threat import load_observations, threat_model


def attack(
    observation: Annotated[Path, typer.Argument(metavar="OBSERVATION", help="A file that a client or tap saved.")],
    attack: Annotated[str, typer.Option(help="Attack, such as ig, or pkg.module:Class.")] = "ig",
    out: Annotated[Path, typer.Option(help="Folder for the reconstruction.")] = Path("reconstruction"),
    model: Annotated[str | None, typer.Option(help="Your own model, where the file names one by import path.")] = None,
    budget: Annotated[str, typer.Option(help="quick, standard or thorough.")] = "standard",
    seed: Annotated[int, typer.Option(help="All random draws derive from it.")] = 0,
) -> None:
    """Rebuild the private data behind saved updates. Nothing is scored: there is no truth here."""
    if budget not in BUDGETS:
        raise GradveilError(f"no budget is called {budget!r}; there are: {', '.join(BUDGETS)}")
    ATTACKS.admit(attack)
    chosen = ATTACKS.build(attack, BUDGETS[budget])
    seen = load_observations(observation, module=model)
    threat_model(seen[0].threat).vet(attack, chosen.requires)
    make_folder(out)  # first: a search takes long, and what it finds must not be lost
    if not os.access(out, os.W_OK | os.X_OK):
        raise GradveilError(f"cannot write into {out}: choose another --out")
    seeds = [derive(seed, "attack", i) for i in range(len(seen))]
    found = chosen(seen, seeds=seeds, progress=Terminal())
    save_reconstructions(out / "reconstruction.safetensors", found)
    for i, one in enumerate(found):
        write_atomically(out / f"{i:03d}.png", seen[i].domain.show(one.inputs))
        say(f"{i:03d}.png  labels {one.labels.tolist()}  objective {one.objective:.3g}")
    say(f"reconstruction: {out / 'reconstruction.safetensors'}")
