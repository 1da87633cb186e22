"""``gradveil audit``, ``report`` and ``score``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from gradveil.auditing import (
    Audit,
    Verdict,
    make_case,
    make_observed_case,
    read_case,
    run_case,
    run_observed,
    score_again,
    write_junit,
)
from gradveil.cli.progress import Terminal
from gradveil.core.errors import GradveilError
from gradveil.core.locks import claimed
from gradveil.metrics.table import METRICS, NOT_AVAILABLE, PERCENT, styled
from gradveil.report import render

CROSSED = 3

_errors = Console(stderr=True)
_out = Console(soft_wrap=True)
_WIDE = 160


def audit(
    case_file: Annotated[
        Path | None, typer.Argument(metavar="[CASE.yaml]", help="A case; options override it.")
    ] = None,
    observations: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Attack exchanges that gradveil train --tap saved instead. Repeatable."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Private data, such as cifar10-samples.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, such as lenet:init=wide, or pkg.module:factory.")] = None,
    defense: Annotated[list[str] | None, typer.Option(help="Defense, such as noise:sigma=0.1. Repeatable.")] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Attack, such as ig:tv=0.01. Repeatable; by itself the suite that the budget names."),
    ] = None,
    threat: Annotated[str | None, typer.Option(help="Threat model A to H, with extras as in C+labels.")] = None,
    images: Annotated[int | None, typer.Option(help="How many private images.")] = None,
    every: Annotated[int | None, typer.Option(help="Take every k-th image of the data set.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Private images behind one update.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs: the client sends a difference (FedAvg).")] = None,
    mini_batch: Annotated[int | None, typer.Option(help="Local mini-batch size (FedAvg).")] = None,
    lr: Annotated[float | None, typer.Option(help="Local learning rate.")] = None,
    train_mode: Annotated[bool | None, typer.Option(help="Batch norm in train or eval mode on the client.")] = None,
    restarts: Annotated[int | None, typer.Option(help="Restarts of each attack.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="quick, standard or thorough: how many attacks, and how hard they try.")
    ] = None,
    gallery: Annotated[int | None, typer.Option(help="Pictures to pick the private one out of.")] = None,
    seed: Annotated[int | None, typer.Option(help="All random draws derive from it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by itself cuda where there is one.")] = None,
    training: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Read what a defense costs off this gradveil train folder. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the audit; by itself audits/ and the time.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an audit that was interrupted.")] = False,
    fail_above: Annotated[
        list[str] | None, typer.Option(metavar="METRIC=VALUE", help="Exit with 3 if a verdict is above it.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE.xml", help="Write one test per defense for continuous integration.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print audit.json and nothing else.")] = False,
) -> None:
    """Attack the updates of clients with each defense, and write what leaked to audit.json and report.html."""
    fields: dict[str, Any] = read_case(case_file) if case_file else {}
    said = {
        "observations": observations or None, "data": data, "model": model, "defenses": defense or None,
        "attacks": attack or None, "threat": threat, "images": images, "every": every, "batch_size": batch_size,
        "restarts": restarts, "budget": budget, "gallery": gallery, "seed": seed, "device": device,
        "training": training or None,
    }  # fmt: skip
    fields |= {key: value for key, value in said.items() if value is not None}
    fields.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    fields |= _recipe(fields.get("recipe"), epochs, mini_batch, lr, train_mode)
    bounds = [_bound(text) for text in fail_above or []]
    folder = _folder(out, resume)
    again = "gradveil audit ... --resume" if out else f"the same command with --out {folder} --resume"
    with claimed(folder):  # until the report is written: it is of these rows
        result = _run(fields, folder, resume, again)
        _tell(result, folder, junit, bounds, as_json)


def _folder(out: Path | None, resume: bool) -> Path:
    if resume and out is None:
        raise GradveilError("--resume goes on with the audit of a folder: name it with --out")
    return out or Path("audits") / time.strftime("%Y%m%d-%H%M%S")


def _tell(result: Audit, folder: Path, junit: Path | None, bounds: list[tuple[str, float]], as_json: bool) -> None:
    """Write what was found for people and machines, and exit with what it means for the bounds."""
    page = render(folder)
    if junit is not None:
        write_junit(result, junit, min((bound for _, bound in bounds), default=None))
    if as_json:
        sys.stdout.write((folder / "audit.json").read_text())
    else:
        _print_summary(result, page)
    _enforce(result, bounds)


def _run(fields: dict[str, Any], folder: Path, resume: bool, again: str) -> Audit:
    """Audit exchanges that are made for it or, where the case names observations, those; ``again``: how to go on."""
    try:
        if "observations" in fields:
            return run_observed(make_observed_case(fields), folder, resume=resume, progress=Terminal(_errors))
        return run_case(make_case(fields), folder, resume=resume, progress=Terminal(_errors))
    except KeyboardInterrupt:
        _errors.print(f"interrupted; finished rows are kept: go on with {again}", highlight=False)
        raise typer.Exit(130) from None


def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an audit.")]) -> None:
    """Write report.html of a saved audit anew."""
    _say(f"report: {render(folder)}")


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
        result = score_again(folder, model=model, progress=Terminal(_errors))
        page = render(folder)
    if metric is None:
        _print_summary(result, page)
        return
    for row in result.rows:
        named = [row.training, row.stage] if result.trainings else []
        found = getattr(row, metric)
        _out.print(*named, row.defense, row.attack, found, sep="\t", highlight=False, markup=False)


def schema() -> None:
    """Print the JSON schema of audit.json."""
    sys.stdout.write(json.dumps(Audit.model_json_schema(mode="serialization"), indent=1) + "\n")


def _recipe(
    given: Any, epochs: int | None, mini_batch: int | None, lr: float | None, train_mode: bool | None
) -> dict[str, Any]:
    """The recipe of the case file, if any, with the command line's options over it; several steps mean FedAvg."""
    recipe = dict(given) if isinstance(given, dict) else {}
    said = {"epochs": epochs, "batch_size": mini_batch, "lr": lr, "train_mode": train_mode}
    recipe |= {key: value for key, value in said.items() if value is not None}
    if epochs is not None or mini_batch is not None:
        recipe["sends"] = "delta"
    return {"recipe": recipe} if recipe else {}


def _bound(text: str) -> tuple[str, float]:
    metric, equals, value = text.partition("=")
    try:
        if metric != "identified" or not equals or not 0 <= float(value) <= 1:
            raise ValueError
        return metric, float(value)
    except ValueError:
        raise GradveilError(
            f"cannot read the bound {text!r}; write --fail-above identified=0.1, a share from 0 to 1"
        ) from None


def _enforce(result: Audit, bounds: list[tuple[str, float]]) -> None:
    for metric, bound in bounds:
        for verdict in result.verdicts:
            if verdict.identified is None:
                raise GradveilError(f"{metric} was not measured under {verdict.defense}: a bound on it needs the truth")
            if verdict.identified > bound:
                _errors.print(f"{metric} is {verdict.identified:.3g} under {verdict.defense}, above {bound:g}")
                raise typer.Exit(CROSSED)


def _print_summary(result: Audit, page: Path) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    observed, metrics = bool(result.trainings), [metric for metric in METRICS.values() if metric.in_summary]
    metrics.sort(key=lambda metric: metric.style == PERCENT)  # shares stand last
    for title in ("training", "defense", "attack") if observed else ("defense", "attack"):
        table.add_column(title, overflow="fold")
    for title in (*(["stage"] if observed else []), *(metric.in_summary for metric in metrics), "seconds"):
        table.add_column(title, justify="right")
    for row in result.rows:
        defense, attack = row.defense, row.attack
        training, stage = row.training or NOT_AVAILABLE, row.stage or NOT_AVAILABLE
        if row.is_prior:
            defense = training = stage = "any"
            attack = f"prior-only ({row.prior_of})"
        table.add_row(
            *([training] if observed else []), defense, attack, *([stage] if observed else []),
            *(metric.format(getattr(row, metric.name)) for metric in metrics), styled(row.seconds, ".1f"),
        )  # fmt: skip
    (_out if _out.is_terminal else Console(width=_WIDE)).print(table)  # a file or a pipe has no edge to wrap at
    _out.print()
    for verdict in result.verdicts:
        _print_verdict(verdict)
    missing: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(pair for row in result.rows for pair in row.not_available.items()):
        missing.setdefault(reason, []).append(name)
    for reason, names in missing.items():
        _say(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not available: {reason}")
    _say(f"\nreport: {page}")


def _print_verdict(verdict: Verdict) -> None:
    _say(f"{verdict.sentence} ({'not graded' if verdict.grade is None else f'grade {verdict.grade}'})")
    if verdict.flags:
        _say(f"  Flags: {', '.join(verdict.flags)}.")
    if verdict.rebuilt is not None:
        share, attack = verdict.rebuilt.identified, (verdict.rebuilt.attack or "").partition(":")[0]
        _say(f"  Without candidates, {styled(share, PERCENT)} were identified by what {attack} rebuilt.")
    if verdict.cost is not None:
        _say(f"  {verdict.cost.sentence} (grade {verdict.cost.grade})")


def _say(text: str) -> None:
    _out.print(text, highlight=False, markup=False)
