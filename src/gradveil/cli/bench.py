"""``gradveil bench``: one JSON object each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from gradveil import bench
from gradveil.bench.throughput import CIFAR

app = typer.Typer(help="Benchmarks, each against a baseline in the same run.", no_args_is_help=True)


@app.callback()
def _several() -> None: ...


@app.command()
def throughput(
    attack: Annotated[str, typer.Option(help="Attack to step.")] = "ig",
    model: Annotated[str, typer.Option(help="Model, such as resnet18.")] = "lenet:init=wide",
    problems: Annotated[int, typer.Option(help="Problems stepped together.")] = 16,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 20,
    size: Annotated[int, typer.Option(help="Side of the images.")] = 32,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Problem-steps per second of the engine against a plain eager loop."""
    domain = replace(CIFAR, height=size, width=size)
    result = bench.throughput(attack=attack, model=model, problems=problems, steps=steps, device=device, domain=domain)
    typer.echo(json.dumps(result))
