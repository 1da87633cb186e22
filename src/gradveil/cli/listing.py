"""``gradveil list``: what there is, with options and one line each."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradveil.assets import CATALOGUE, is_fetched
from gradveil.attacks import ATTACKS
from gradveil.core.registry import Registry
from gradveil.data import DATASETS
from gradveil.defenses import DEFENSES
from gradveil.generators import GENERATORS
from gradveil.models import MODELS
from gradveil.threat import THREATS

_out = Console()


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
    registries: dict[Kind, Registry[Any]] = {
        Kind.ATTACKS: ATTACKS,
        Kind.DEFENSES: DEFENSES,
        Kind.MODELS: MODELS,
        Kind.GENERATORS: GENERATORS,
        Kind.DATA: DATASETS,
    }
    if kind in registries:
        _registry(registries[kind])
    elif kind is Kind.ASSETS:
        _assets()
    else:
        _threats()


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _registry(registry: Registry[Any]) -> None:
    table = _table("name", "options", "what it is")
    for name in registry:
        options = ", ".join(
            f"{key}" if p.default is p.empty else f"{key}={p.default}" for key, p in registry.options(name).items()
        )
        table.add_row(name, options, registry.summary(name))
    _out.print(table, highlight=False)


def _assets() -> None:
    table = _table("name", "here", "size", "licence", "what it is")
    for name, asset in CATALOGUE.items():
        table.add_row(name, "ready" if is_fetched(name) else "absent", asset.size, asset.licence, asset.title)
    _out.print(table, highlight=False)


def _threats() -> None:
    table = _table("name", "title", "knows and may")
    for threat in THREATS.values():
        table.add_row(threat.name, threat.title, ", ".join(sorted(threat.knows)) or "updates only")
    _out.print(table, highlight=False)
