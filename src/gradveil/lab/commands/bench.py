"""``gradveil bench``: one JSON object each. The options are the arguments of the benchmarks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import typer

from gradveil.cli.options import admit, checked_device, with_parameters
from gradveil.cli.progress import Terminal
from gradveil.core.fields import Json
from gradveil.core.progress import Progress
from gradveil.lab.bench import BENCHES

app = typer.Typer(help="Benchmarks, each against a baseline in the same run.", no_args_is_help=True)


@app.callback()
def _several() -> None: ...


def _command(name: str, work: Callable[..., Json]) -> Callable[..., None]:
    """The command of a benchmark, with an option for each argument that has a help."""
    hints = get_type_hints(work, include_extras=True)
    defaults = {one.name: one.default for one in inspect.signature(work).parameters.values()}
    parameters = []
    for argument, default in defaults.items():
        if hints[argument] is Progress:
            continue
        kind, text = get_args(hints[argument])
        option = typer.Option(help=text, min=1 if kind is int else None)
        if argument == "device":
            option = typer.Option(help=text, callback=checked_device)
        if kind == Sequence[str]:  # one value at a time: --defense, and all by default
            option, kind, default = typer.Option(f"--{argument.removesuffix('s')}", help=text), list[str] | None, None
        parameters.append(
            inspect.Parameter(
                argument, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )
        )

    def command(**options: Any) -> None:
        given = {argument: value for argument, value in options.items() if value is not None}
        admit(given)
        if Progress in hints.values():
            given["progress"] = Terminal()
        typer.echo(json.dumps(BENCHES[name](**given)))

    return with_parameters(command, parameters, inspect.getdoc(work))


for _name, _work in BENCHES.items():
    app.command(_name)(_command(_name, _work))
