"""``gradveil train``: federated training, its accuracy per round and its cost."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.options import checked_device, fields_of_file, options_from
from gradveil.cli.progress import Terminal, say
from gradveil.core.errors import GradveilError
from gradveil.core.fields import Json
from gradveil.core.plugins import refuse_unloaded_models
from gradveil.federated import Training, TrainingRecord, make_training, read_training, run_training
from gradveil.report import render_trainings


@options_from(Training)
def train(
    given: Json,
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[CASE.yaml]", help="A case; options override it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default: trainings/ and the time.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the training in --out.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw the curves of finished trainings: --compare DIR DIR --out page.html")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print train.json and nothing else.")] = False,
) -> None:
    """Train a model among clients, with a defense or without: accuracy, time and bytes per round in train.json."""
    if compare:
        say(f"page: {render_trainings(paths or [], out or Path('trainings.html'))}")
        return
    if paths and len(paths) > 1:
        raise GradveilError("one case at a time; several folders are for --compare DIR DIR --out page.html")
    if resume and out is None:
        raise GradveilError("--resume needs the folder to go on with: add --out DIR")
    folder = out or Path("trainings") / time.strftime("%Y%m%d-%H%M%S")
    fields = given
    if paths:
        fields = fields_of_file(paths[0], given)
    elif resume:
        if not (folder / "train.json").exists():
            raise GradveilError(f"there is no training in {folder} to go on with: to start one, leave --resume out")
        fields = read_training(folder)["case"] | given
        refuse_unloaded_models({} if "model" in given else fields)
    fields.setdefault("device", checked_device(None))
    warn = partial(say, err=True)
    try:
        result = run_training(make_training(fields), folder, resume=resume, progress=Terminal(), say=warn)
    except KeyboardInterrupt:
        begun = (folder / "train.json").exists()
        warn(f"interrupted; go on with gradveil train --out {folder} --resume" if begun else "interrupted in round 1")
        raise typer.Exit(130) from None
    if as_json:
        sys.stdout.write((folder / "train.json").read_text())
    else:
        _print_summary(result, folder)


def _print_summary(result: TrainingRecord, folder: Path) -> None:
    rows, case = result["rows"], result["case"]
    seconds = sum(row["seconds"] for row in rows)
    up, down = sum(row["bytes_up"] for row in rows) / 1e6, sum(row["bytes_down"] for row in rows) / 1e6
    dropped = sum(len(row["dropped"]) for row in rows)
    what = f"{len(rows)} rounds of {case['algorithm']} on {case['data']}"
    under = "without a defense" if case["defense"] == "none" else f"under {case['defense']}"
    share = rows[-1]["accuracy"]
    reached = "accuracy not evaluated" if share is None else f"{share:.1%} accuracy"
    cost = f"{seconds:.1f} s, {up:.1f} MB up, {down:.1f} MB down"
    say(f"{reached} {under} after {what}: {cost}" + (f", {dropped} replies dropped" if dropped else ""))
    if rows[-1]["loss"] is None:
        say("the model diverged: its loss is not finite")
    if "epsilon" in rows[-1]:
        spent = "infinite" if rows[-1]["epsilon"] is None else f"{rows[-1]['epsilon']:.4g}"
        say(f"epsilon {spent} at delta {rows[-1]['delta']:g}, by the client that took part most")
    for name, value in rows[-1]["log"].items():
        say(f"{name} in the last round: {value:.4g}")
    say(f"training: {folder / 'train.json'}")
