"""``gradveil audit``, ``report`` and ``score``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.table import Table

from gradveil.auditing import (
    Audit,
    AuditGate,
    Case,
    ObservedCase,
    Verdict,
    make_case,
    make_observed_case,
    run_case,
    run_observed,
    score_again,
    write_junit,
)
from gradveil.cli import ARGUMENTS, printable, shown
from gradveil.cli.options import checked_device, fields_of_file, options_from
from gradveil.cli.progress import Terminal, print_table, say
from gradveil.core.environment import typed
from gradveil.core.errors import GradveilError
from gradveil.core.fields import Json
from gradveil.core.locks import claimed
from gradveil.metrics.table import METRICS, NOT_AVAILABLE, PERCENT, styled
from gradveil.report import render
from gradveil.report.answers import answers, outcomes, recommendations

CROSSED = 3


@options_from(Case, ObservedCase, leave_out=("recipe", "unfit"))
def audit(
    given: Json,
    case_file: Annotated[
        Path | None, typer.Argument(metavar="[CASE.yaml]", help="A case; options override it.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs: the client sends a difference (FedAvg).")] = None,
    mini_batch: Annotated[int | None, typer.Option(help="Local mini-batch size (FedAvg).")] = None,
    lr: Annotated[float | None, typer.Option(help="Local learning rate. [default: 0.1]")] = None,
    train_mode: Annotated[
        bool | None, typer.Option(help="Batch norm in train or eval mode on the client; default: eval.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the audit; default: audits/ and the time.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an audit that was interrupted.")] = False,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=VALUE",
            help="Exit with 3 if identified, recognised, rebuilt, member or labels may be above it. Repeatable.",
        ),
    ] = None,
    require_grade: Annotated[
        str | None, typer.Option(metavar="GRADE", help="Exit with 3 if a defense has a worse grade.")
    ] = None,
    point: Annotated[
        bool, typer.Option("--point", help="--fail-above judges the estimate, not the upper end of its interval.")
    ] = False,
    gate_none: Annotated[
        bool, typer.Option("--gate-none", help="Clients without a defense have to pass --fail-above too.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE.xml", help="Write one test per defense for continuous integration.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print audit.json and nothing else.")] = False,
) -> None:
    """Attack the updates of clients with each defense, and write what leaked to audit.json and report.html."""
    fields = fields_of_file(case_file, given) if case_file else given
    fields.setdefault("device", checked_device(None))
    steps = {"epochs": epochs, "batch_size": mini_batch, "lr": lr, "train_mode": train_mode}
    recipe: dict[str, object] = {key: value for key, value in steps.items() if value is not None}
    if epochs is not None or mini_batch is not None:
        recipe["sends"] = "delta"  # several steps mean FedAvg
    if recipe:
        written = fields.get("recipe")
        fields["recipe"] = (written if isinstance(written, dict) else {}) | recipe
    gate = AuditGate.read(fail_above or [], require_grade, point=point, baseline=gate_none)
    if resume and out is None:
        raise GradveilError("--resume goes on with the audit of a folder: name it with --out")
    folder = out or Path("audits") / time.strftime("%Y%m%d-%H%M%S")
    again = "gradveil audit ... --resume" if out else f"the same command with --out {folder} --resume"
    command = typed(click.get_current_context().meta[ARGUMENTS])
    with claimed(folder):  # until the report is written: it is of these rows
        if junit is not None and junit.exists():  # that of an earlier audit must not stand for one that dies
            write_junit(Audit(rows=(), complete=False), junit, gate)
        try:
            if "observations" in fields:
                saved = make_observed_case(fields)
                result = run_observed(saved, folder, resume=resume, command=command, progress=Terminal())
            else:
                case = make_case(fields)
                result = run_case(case, folder, resume=resume, command=command, progress=Terminal())
        except KeyboardInterrupt:
            say(f"interrupted; finished rows are kept: go on with {again}", err=True)
            raise typer.Exit(130) from None
        page = render(folder)
        if junit is not None:
            write_junit(result, junit, gate)
        if as_json:
            sys.stdout.write((folder / "audit.json").read_text())
        else:
            _print_summary(result, page)
        violations = gate.violations(result)
        for one in violations:
            say(one.words if one.defense in one.words else f"{one.defense}: {one.words}", err=True)
            if os.environ.get("GITHUB_ACTIONS") == "true":
                typer.echo(printable(one.annotation()), err=True)
        if violations:
            raise typer.Exit(CROSSED)


def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an audit.")]) -> None:
    """Write report.html of a saved audit anew."""
    say(f"report: {render(folder)}")


def score(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an audit.")],
    metric: Annotated[str | None, typer.Option(help="Print this metric only, one line per row.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model of the audit where it is your own code, as PACKAGE:FUNCTION.")
    ] = None,
) -> None:
    """Score the saved reconstructions of an audit again, without attacking again."""
    known = [name for name, one in METRICS.items() if one.meaning]
    if metric is not None and metric not in known:
        raise GradveilError(f"no metric is called {metric!r}; there are: {', '.join(known)}")
    with claimed(folder):
        result = score_again(folder, model=model, progress=Terminal())
        page = render(folder)
    if metric is None:
        _print_summary(result, page)
        return
    for row in result.rows:
        named = [row.training, row.stage] if result.trainings else []
        say("\t".join(map(str, (*named, row.defense, row.attack, getattr(row, metric)))))


def schema() -> None:
    """Print the JSON schema of audit.json."""
    sys.stdout.write(json.dumps(Audit.model_json_schema(mode="serialization"), indent=1) + "\n")


def _print_summary(result: Audit, page: Path) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    observed, metrics = bool(result.trainings), [metric for metric in METRICS.values() if metric.in_summary]
    metrics.sort(key=lambda metric: metric.style == PERCENT)  # shares stand last
    for title in ("training", "defense", "attack") if observed else ("defense", "attack"):
        table.add_column(title, overflow="fold")
    for title in (*(["stage"] if observed else []), *(metric.in_summary for metric in metrics), "seconds"):
        table.add_column(title, justify="right")
    for row in result.rows:
        defense, attack = row.defense if observed or row.stage is None else f"{row.defense}, {row.stage}", row.attack
        training, stage = row.training or NOT_AVAILABLE, row.stage or NOT_AVAILABLE
        if row.is_prior:
            defense = training = stage = "any"
            attack = f"prior-only ({row.prior_of})"
        table.add_row(
            *map(shown, ([training] if observed else []) + [defense, attack] + ([stage] if observed else [])),
            *(metric.format(getattr(row, metric.name)) for metric in metrics), styled(row.seconds, ".1f"),
        )  # fmt: skip
    print_table(table)
    say()
    people = result.labels_are_people
    short = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    short.add_column("defense", overflow="fold")
    for title in ("grade", *(one.name for one in answers(Verdict(defense="none"), people=people)), "ceiling"):
        short.add_column(title, justify="right")
    for verdict in result.verdicts:
        most = verdict.ceiling.recognised if verdict.ceiling else None
        told = [one.brief() for one in answers(verdict, people=people)]
        short.add_row(
            shown(verdict.defense),
            shown(verdict.grade or "none"),
            *told,
            "none" if most is None else styled(most, PERCENT),
        )
    print_table(short)
    say()
    for verdict in result.verdicts:
        say(f"{verdict.sentence} ({'not graded' if verdict.grade is None else f'grade {verdict.grade}'})")
        if verdict.flags:
            say(f"  Flags: {', '.join(verdict.flags)}.")
        if verdict.cost is not None:
            say(f"  {verdict.cost.sentence} (grade {verdict.cost.grade})")
    for verdict in result.verdicts:
        if verdict.certificate is not None:
            say()
            for line in verdict.certificate.text.splitlines():
                say(line)
    missing: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(pair for row in result.rows for pair in row.not_available.items()):
        missing.setdefault(reason, []).append(name)
    for reason, names in missing.items():
        say(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not available: {reason}")
    advice = recommendations(result)
    first = next((one for one in advice if one.command), advice[0])
    say()
    for line in outcomes(result):
        say(line)
    say(f"Next: {first.why}")
    if first.command:
        say(f"  {first.command}")
    say(f"report: {page}")
