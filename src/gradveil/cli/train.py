"""``gradveil train``: federated training, its accuracy per round and its cost."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from gradveil.auditing import read_case
from gradveil.cli.progress import Terminal
from gradveil.core.errors import GradveilError
from gradveil.federated import make_training, read_training, run_training
from gradveil.report import render_trainings

_errors = Console(stderr=True, soft_wrap=True)
_out = Console(soft_wrap=True)


def train(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[CASE.yaml]", help="A case; options override it.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="What the clients share, such as mnist or cifar10.")] = None,
    test: Annotated[str | None, typer.Option(help="Data to evaluate on; by itself the test split, or a fifth.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, such as resnet18, or pkg.module:factory.")] = None,
    examples: Annotated[int | None, typer.Option(help="Examples dealt out to the clients; by itself all.")] = None,
    partition: Annotated[str | None, typer.Option(help="iid, dirichlet:alpha=0.5 or shards:each=2.")] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients there are.")] = None,
    per_round: Annotated[int | None, typer.Option(help="How many take part in a round; by itself all.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="fedavg, or fedsgd: one gradient per client and round.")] = None,
    lr: Annotated[float | None, typer.Option(help="Local learning rate.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs (FedAvg).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Local mini-batch; FedSGD: examples per gradient.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of the local steps.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of the local steps.")] = None,
    train_mode: Annotated[bool | None, typer.Option(help="Batch norm in train or eval mode on the client.")] = None,
    server_lr: Annotated[float | None, typer.Option(help="Step of the server along the clients' mean.")] = None,
    server_momentum: Annotated[float | None, typer.Option(help="Momentum of the server's step.")] = None,
    defense: Annotated[str | None, typer.Option(help="Defense of every client, such as censor:trials=20.")] = None,
    tap: Annotated[
        list[str] | None, typer.Option(metavar="CLIENT@ROUND", help="Save this exchange, as *@1. Repeatable.")
    ] = None,
    threat: Annotated[str | None, typer.Option(help="Who sees the exchanges that are saved, A to H.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Evaluate every k-th round, and the last.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Save the model every k-th round.")] = None,
    side_by_side: Annotated[str | None, typer.Option(help="Clients batched together: auto, true or false.")] = None,
    seed: Annotated[int | None, typer.Option(help="All random draws derive from it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by itself cuda where there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; by itself trainings/ and the time.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the training in --out.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw the curves of finished trainings: --compare DIR DIR --out page.html")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print train.json and nothing else.")] = False,
) -> None:
    """Train a model among clients, with a defense or without: accuracy, time and bytes per round in train.json."""
    if compare:
        page = render_trainings(paths or [], out or Path("trainings.html"))
        _out.print(f"page: {page}", highlight=False, markup=False)
        return
    _check(paths or [], out, resume)
    said = {
        "data": data, "test": test, "examples": examples, "model": model, "partition": partition, "clients": clients,
        "per_round": per_round, "rounds": rounds, "algorithm": algorithm, "lr": lr, "epochs": epochs,
        "batch_size": batch_size,
        "momentum": momentum, "weight_decay": weight_decay, "train_mode": train_mode, "server_lr": server_lr,
        "server_momentum": server_momentum, "defense": defense, "tap": tap or None, "threat": threat,
        "evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every, "side_by_side": side_by_side,
        "seed": seed, "device": device,
    }  # fmt: skip
    folder = out or Path("trainings") / time.strftime("%Y%m%d-%H%M%S")
    fields = _base(paths, folder, resume) | {key: value for key, value in said.items() if value is not None}
    result = _trained(fields, folder, resume)
    if as_json:
        sys.stdout.write((folder / "train.json").read_text())
    else:
        _print_summary(result, folder)


def _check(paths: list[Path], out: Path | None, resume: bool) -> None:
    if len(paths) > 1:
        raise GradveilError("one case at a time; several folders are for --compare DIR DIR --out page.html")
    if resume and out is None:
        raise GradveilError("--resume needs the folder to go on with: add --out DIR")


def _base(paths: list[Path] | None, folder: Path, resume: bool) -> dict[str, Any]:
    """The fields that options go over: of the case file or, to go on with a training, its own."""
    if paths:
        return read_case(paths[0])
    if resume and not (folder / "train.json").exists():
        raise GradveilError(f"there is no training in {folder} to go on with: to start one, leave --resume out")
    return dict(read_training(folder)["case"]) if resume else {}


def _trained(fields: dict[str, Any], folder: Path, resume: bool) -> dict[str, Any]:
    """The training in the folder, run to its end; interrupted, it says how to go on."""

    def say(line: str) -> None:
        _errors.print(line, highlight=False, markup=False)

    fields.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        return run_training(make_training(fields), folder, resume=resume, progress=Terminal(_errors), say=say)
    except KeyboardInterrupt:
        begun = (folder / "train.json").exists()
        say(f"interrupted; go on with gradveil train --out {folder} --resume" if begun else "interrupted in round 1")
        raise typer.Exit(130) from None


def _print_summary(result: dict[str, Any], folder: Path) -> None:
    rows, case = result["rows"], result["case"]
    seconds = sum(row["seconds"] for row in rows)
    up, down = (sum(row[f"bytes_{way}"] for row in rows) / 1e6 for way in ("up", "down"))
    dropped = sum(len(row["dropped"]) for row in rows)
    what = f"{len(rows)} rounds of {case['algorithm']} on {case['data']}"
    under = "without a defense" if case["defense"] == "none" else f"under {case['defense']}"
    share = rows[-1]["accuracy"]
    reached = "accuracy not evaluated" if share is None else f"{share:.1%} accuracy"
    _out.print(
        f"{reached} {under} after {what}: "
        f"{seconds:.1f} s, {up:.1f} MB up, {down:.1f} MB down"
        + (f", {dropped} replies dropped" if dropped else ""),
        highlight=False, markup=False,
    )  # fmt: skip
    if rows[-1]["loss"] is None:
        _out.print("the model diverged: its loss is not finite")
    if "epsilon" in rows[-1]:
        spent = "infinite" if rows[-1]["epsilon"] is None else f"{rows[-1]['epsilon']:.4g}"
        _out.print(
            f"epsilon {spent} at delta {rows[-1]['delta']:g}, by the client that took part most",
            highlight=False,
            markup=False,
        )
    for name, value in rows[-1]["log"].items():
        _out.print(f"{name} in the last round: {value:.4g}", highlight=False, markup=False)
    _out.print(f"training: {folder / 'train.json'}", highlight=False, markup=False)
