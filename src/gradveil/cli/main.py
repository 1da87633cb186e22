"""The command line: parse, call, print.

Exit codes: 0 done, 1 a case of a sweep failed, 2 bad input, 3 a bound was crossed or a broadcast looks crafted, 130
interrupted.
"""

from __future__ import annotations

import os

# Threads that wait should soon sleep: spinning ones make two processes on the same cores fifty times slower than one.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import click
import typer
import typer.core

from gradveil import __version__
from gradveil.cli import ARGUMENTS, shown
from gradveil.core.errors import GradveilError, PluginWarning

INTERRUPTED = "gradveil: interrupted"
COMMANDS = {
    "audit": (
        "gradveil.cli.audit:audit",
        "Attack the updates of clients with each defense, and write what leaked to audit.json and report.html.",
    ),
    "report": ("gradveil.cli.audit:report", "Write report.html of a saved audit anew."),
    "score": (
        "gradveil.cli.audit:score",
        "Score the saved reconstructions of an audit again, without attacking again.",
    ),
    "schema": ("gradveil.cli.audit:schema", "Print the JSON schema of audit.json."),
    "attack": (
        "gradveil.cli.attack:attack",
        "Rebuild the private data behind saved updates. Nothing is scored: there is no truth here.",
    ),
    "train": (
        "gradveil.cli.train:train",
        "Train a model among clients, with a defense or without: accuracy, time and bytes per round in train.json.",
    ),
    "advise": (
        "gradveil.lab.commands.advise:advise",
        "Try defenses by short audits and trainings, and say which one keeps two wishes, with the command to run it.",
    ),
    "sweep": (
        "gradveil.lab.commands.sweep:sweep",
        "Run every case of a study that is not done yet; each gets a folder, named by its digest, with result.json.",
    ),
    "reproduce": (
        "gradveil.lab.commands.reproduce:reproduce",
        "Run a table or figure of a paper, and write a page with the paper's figures beside ours. Done cases are kept.",
    ),
    "leaderboard": (
        "gradveil.lab.commands.leaderboard:leaderboard",
        "Enter defenses into the leaderboard, or only write its page anew; run again, it goes on where it stopped.",
    ),
    "inspect": (
        "gradveil.cli.inspect:inspect",
        "Look for the marks of a dishonest server in a broadcast. Exits with 3 if there are any, with 0 if not.",
    ),
    "list": (
        "gradveil.cli.listing:show",
        "List attacks, defenses, models, generators, data sets, assets or threat models.",
    ),
    "assets": ("gradveil.cli.assets:app", "Data sets and weights: fetch and verify."),
    "bench": ("gradveil.lab.commands.bench:app", "Benchmarks, each against a baseline in the same run."),
    "generator": (
        "gradveil.lab.commands.generator:app",
        "Generators, the prior of generative attacks: train one, look at one.",
    ),
}
"""By name: where a command is, and what it does. Help reads this table alone: most commands load torch."""

LOADING = COMMANDS.keys() - {"schema", "list", "assets"}
"""Commands that name attacks, defenses, models, generators or metrics, which may be somebody's own."""

# Where Rich is installed, Typer escapes brackets for it even in help that Rich does not print: "\\[default: ig]".
typer.core.HAS_RICH = False


def _load_option() -> click.Option:
    def load(_context: click.Context, _option: click.Parameter, named: tuple[str, ...]) -> None:
        for what in named:
            import_module("gradveil.core.plugins").load(what)

    return click.Option(
        ["--load"], multiple=True, expose_value=False, is_eager=True, callback=load, metavar="FILE.py",
        help="Run your own file, or import package.module, first: it registers attacks, defenses and more. Repeatable.",
    )  # fmt: skip


class Commands(typer.core.TyperGroup):
    """Loads a command when it is called, and says so when one is interrupted: Typer exits without a word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        found = getattr(import_module(module), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
            alone.command(cmd_name)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = cmd_name
        for one in command.commands.values() if isinstance(command, click.Group) else [command]:
            if cmd_name in LOADING:
                one.params.append(_load_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # a command that says so itself raises an Exit
            print(INTERRUPTED, file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="gradveil",
    cls=Commands,
    help="Shows what a federated-learning update gives away about the private data behind it, and stops it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


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


_format_other_warning = warnings.formatwarning


def _format_warning(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
    if issubclass(category, PluginWarning):
        return f"gradveil: {message}\n"
    return _format_other_warning(message, category, *place, **line)


def run() -> None:
    """The entry point: every error a person can act on becomes one line, as does every warning of ours."""
    warnings.formatwarning = _format_warning
    try:
        app(standalone_mode=True)
    except GradveilError as error:
        print(f"gradveil: {shown(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    run()
