"""``gradveil bench``: one JSON object each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from gradveil import bench
from gradveil.bench.timing import CIFAR
from gradveil.cli.device import checked_device
from gradveil.cli.progress import Terminal

app = typer.Typer(help="Benchmarks, each against a baseline in the same run.", no_args_is_help=True)
Device = Annotated[str, typer.Option(callback=checked_device, help="cpu or cuda.")]


@app.callback()
def _several() -> None: ...


@app.command()
def throughput(
    attack: Annotated[str, typer.Option(help="Attack to step.")] = "ig",
    model: Annotated[str, typer.Option(help="Model, such as resnet18.")] = "lenet:init=wide",
    problems: Annotated[int, typer.Option(min=1, help="Problems stepped together.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 20,
    size: Annotated[int, typer.Option(min=1, help="Side of the images.")] = 32,
    device: Device = "cpu",
) -> None:
    """Problem-steps per second of the engine against a plain eager loop."""
    domain = replace(CIFAR, height=size, width=size)
    result = bench.throughput(attack=attack, model=model, problems=problems, steps=steps, device=device, domain=domain)
    typer.echo(json.dumps(result))


@app.command()
def overhead(
    model: Annotated[str, typer.Option(help="Model, such as resnet18.")] = "lenet",
    batch_size: Annotated[int, typer.Option(min=1, help="Examples in the local step.")] = 64,
    device: Device = "cpu",
    defense: Annotated[list[str] | None, typer.Option(help="Only these defenses; may stand several times.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; the fastest counts.")] = 5,
) -> None:
    """Time of one local step with each defense over one without."""
    result = bench.overhead(
        model=model,
        batch_size=batch_size,
        device=device,
        defenses=tuple(defense or bench.STANDARD_DEFENSES),
        repeats=repeats,
        progress=Terminal(Console(stderr=True)),
    )
    typer.echo(json.dumps(result))


@app.command()
def generation(
    model: Annotated[str, typer.Option(help="Model, such as resnet18.")] = "lenet:init=wide",
    images: Annotated[int, typer.Option(min=1, help="Images that are attacked together.")] = 8,
    population: Annotated[int, typer.Option(min=1, help="Codes in a generation of each.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Timed generations.")] = 10,
    device: Device = "cpu",
) -> None:
    """Time of one generation of CMA-ES against one gradient step on as many codes."""
    result = bench.generation(model=model, images=images, population=population, rounds=rounds, device=device)
    typer.echo(json.dumps(result))


@app.command()
def rounds(
    model: Annotated[str, typer.Option(help="Model, such as resnet18.")] = "lenet",
    clients: Annotated[int, typer.Option(min=1, help="Clients of the round.")] = 10,
    examples: Annotated[int, typer.Option(min=1, help="Random images at each client.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Of the local steps.")] = 64,
    defense: Annotated[str, typer.Option(help="Of every client.")] = "none",
    device: Device = "cpu",
) -> None:
    """Time of a round of federated averaging with its clients side by side, against one after another."""
    result = bench.rounds(
        model=model, clients=clients, examples=examples, batch_size=batch_size, defense=defense, device=device
    )
    typer.echo(json.dumps(result))


@app.command()
def sweep(
    cases: Annotated[int, typer.Option(min=1, help="Cases of the sweep.")] = 20,
    iterations: Annotated[int, typer.Option(min=1, help="Steps of the attack in each.")] = 300,
    model: Annotated[str, typer.Option(help="Model, such as resnet18.")] = "lenet:init=wide",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; the fastest counts.")] = 3,
) -> None:
    """Time of a sweep by one worker against its cases in a plain loop."""
    typer.echo(json.dumps(bench.sweep(cases=cases, iterations=iterations, model=model, repeats=repeats)))
