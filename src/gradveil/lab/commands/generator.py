"""``gradveil generator train`` and ``show``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.cli.options import checked_device
from gradveil.cli.progress import Terminal, say
from gradveil.core.atomic import write_atomically
from gradveil.generators import build, draw_sheet
from gradveil.lab.generators.training import Schedule, beside, fit

app = typer.Typer(help="Generators, the prior of generative attacks: train one, look at one.", no_args_is_help=True)


@app.command()
def train(
    data: Annotated[str, typer.Option(help="Data set, such as cifar10; its train split is used.")],
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="Where the generator goes.")],
    steps: Annotated[int, typer.Option(help="Updates of the generator.")] = 20_000,
    batch_size: Annotated[int, typer.Option(help="Images in one update.")] = 64,
    critic_steps: Annotated[int, typer.Option(help="Updates of the critic for each of the generator.")] = 5,
    lr: Annotated[float, typer.Option(help="Learning rate of both.")] = 2e-4,
    flip: Annotated[bool, typer.Option(help="Mirror half of the images.")] = False,
    latent: Annotated[int, typer.Option(help="Length of a code.")] = 128,
    features: Annotated[int, typer.Option(help="Width of the generator and of the critic.")] = 128,
    kernel: Annotated[int, typer.Option(help="Side of the kernels: 2, as GGL says, or 4.")] = 4,
    seed: Annotated[int, typer.Option(help="All random draws derive from it.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a training that was interrupted.")] = False,
) -> None:
    """Train a generator on images of up to 32x32, with a checkpoint and a sheet of draws at every tenth of the way."""
    schedule = Schedule(steps=steps, batch=batch_size, critic_steps=critic_steps, lr=lr, flip=flip, seed=seed)
    result = fit(
        data,
        out,
        schedule,
        latent=latent,
        features=features,
        kernel=kernel,
        device=checked_device(device),
        resume=resume,
        progress=Terminal(),
        stop=_interrupt_asked(),
    )
    if result is None:
        say("interrupted; a checkpoint is kept: go on with the same command and --resume", err=True)
        raise typer.Exit(130)
    say(f"generator: {out}")
    say(f"draws: {beside(out)[1]}")


@app.command()
def show(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A generator, such as cifar10; see: list generators.")],
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="Where the picture goes.")],
    rows: Annotated[int, typer.Option(min=1, max=100, help="Rows of ten draws.")] = 4,
    seed: Annotated[int, typer.Option(help="Decides which codes are drawn.")] = 0,
) -> None:
    """Draw a sheet of images, ten in a row; where there are classes, each column is one."""
    generator = build(spec, progress=Terminal())
    write_atomically(out, draw_sheet(generator, rows=rows, seed=seed, progress=Terminal()))
    say(f"{spec}: codes of {generator.latent} to images of {'x'.join(map(str, generator.shape))}")
    say(f"stages: {', '.join(generator.stages)}")
    for key, value in generator.card.items():
        listed = value.items() if isinstance(value, dict) else ()
        say(f"{key}: {', '.join(f'{name} {entry}' for name, entry in listed) or value}")
    say(f"draws: {out}")


@contextmanager
def _interrupt_asked() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: half a step cannot be resumed, so that a step is finished first; twice stops now."""
    asked = False

    def ask(_signal: int, _frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
