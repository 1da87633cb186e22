"""``gradveil list``: what there is, with options and one line each; of other packages, where it comes from.

What is registered is known once torch is loaded, which takes seconds. So its lines are kept in ``names.json``, which
``python -m gradveil.cli.listing`` writes anew. A test fails where it is old.
"""

from __future__ import annotations

import json
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gradveil.core.registry import Registry

NAMES = Path(__file__).with_name("names.json")


class Kind(StrEnum):
    """What can be listed."""

    ATTACKS = "attacks"
    DEFENSES = "defenses"
    MODELS = "models"
    GENERATORS = "generators"
    DATA = "data"
    ASSETS = "assets"
    THREATS = "threats"


def show(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List attacks, defenses, models, generators, data sets, assets or threat models."""
    if kind is Kind.ASSETS:
        from gradveil.assets import CATALOGUE, is_fetched  # whether they are here is not known beforehand

        titles = ["name", "here", "size", "licence", "what it is"]
        rows = [
            [name, "ready" if is_fetched(name) else "absent", asset.size, asset.licence, asset.title]
            for name, asset in CATALOGUE.items()
        ]
    else:
        titles = ["name", "title", "knows and may"] if kind is Kind.THREATS else ["name", "options", "what it is"]
        rows = json.loads(NAMES.read_text())[kind]
        ours = {name for name, *_ in rows}
        installed = (point for point in entry_points(group=f"gradveil.{kind}") if point.name not in ours)
        rows += [[one.name, "", f"from {one.dist.name} {one.dist.version}" if one.dist else ""] for one in installed]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False)


def registered() -> dict[str, list[list[str]]]:
    """The lines of everything but assets, as they are now."""
    from gradveil.attacks import ATTACKS
    from gradveil.data import DATASETS
    from gradveil.defenses import DEFENSES
    from gradveil.generators import GENERATORS
    from gradveil.models import MODELS
    from gradveil.threat import THREATS

    found: dict[str, list[list[str]]] = {}
    registries: dict[str, Registry[Any]] = {
        "attacks": ATTACKS,
        "defenses": DEFENSES,
        "models": MODELS,
        "generators": GENERATORS,
        "data": DATASETS,
    }
    for kind, registry in registries.items():
        found[kind] = []
        for name in registry:
            options = registry.options(name).items()
            listed = ", ".join(key if p.default is p.empty else f"{key}={p.default}" for key, p in options)
            found[kind].append([name, listed, registry.summary(name)])
    found["threats"] = [
        [threat.name, threat.title, ", ".join(sorted(threat.knows)) or "updates only"] for threat in THREATS.values()
    ]
    return found


if __name__ == "__main__":
    from gradveil.core.atomic import write_json

    write_json(NAMES, registered(), shared=True)
