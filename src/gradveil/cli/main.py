"""The command line: parse, call, print.

Exit codes: 0 done, 1 a case of a sweep failed, 2 bad input, 3 a bound was crossed or a broadcast looks crafted, 130
interrupted.
"""

from __future__ import annotations

import os

# Threads that wait should soon sleep: spinning ones make two processes on the same cores fifty times slower than one.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import sys
from typing import Annotated, Any

INTERRUPTED = "gradveil: interrupted"

try:  # loading takes seconds, in which a person may think better of it
    import click
    import typer
    import typer.core
    from rich.console import Console

    from gradveil import __version__
    from gradveil.cli import (
        assets,
        attack,
        audit,
        bench,
        generator,
        inspect,
        leaderboard,
        listing,
        reproduce,
        sweep,
        train,
    )
    from gradveil.core.errors import GradveilError
except KeyboardInterrupt:
    print(INTERRUPTED, file=sys.stderr)
    sys.exit(130)

# Where Rich is installed, Typer escapes brackets for it even in help that Rich does not print: "\[default: ig]".
typer.core.HAS_RICH = False


class _Commands(typer.core.TyperGroup):
    """Says that it was interrupted, for Typer exits without a word; a command that says so itself raises an Exit."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(INTERRUPTED, file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="gradveil",
    cls=_Commands,
    help="Shows what a federated-learning update gives away about the private data behind it, and stops it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.command("audit")(audit.audit)
app.command("report")(audit.report)
app.command("score")(audit.score)
app.command("schema")(audit.schema)
app.command("attack")(attack.attack)
app.command("train")(train.train)
app.command("sweep")(sweep.sweep)
app.command("reproduce")(reproduce.reproduce)
app.command("leaderboard")(leaderboard.leaderboard)
app.command("inspect")(inspect.inspect)
app.command("list")(listing.show)
app.add_typer(assets.app, name="assets")
app.add_typer(bench.app, name="bench")
app.add_typer(generator.app, name="generator")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradveil {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def run() -> None:
    """The entry point: every error a person can act on becomes one line."""
    try:
        app(standalone_mode=True)
    except GradveilError as error:
        Console(stderr=True, soft_wrap=True).print(f"gradveil: {error}", markup=False, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    run()
