"""Reproductions on a machine without the command line's packages and without a network; one line a finished case.

    PYTHONPATH=src python scripts/reproduce_gpu.py censor-7 ggl-1 --npz CIFAR-10=test.npz --out DIR --limit 1200
    PYTHONPATH=src python scripts/reproduce_gpu.py censor-7 ggl-1 --npz CIFAR-10=test.npz --out DIR --score

``--scale`` is small, paper (the settings of the text) or release (those of the authors' code, in the same folder as
paper). ``--lines`` runs some lines only, by their words and in the order given, as in ``--lines '4:*csDLG*'``. After
``--limit`` seconds it stops between two steps; the same command goes on where it stopped, also on another machine that
was given the folder. Where LPIPS is missing, ``--score`` adds it later, here or elsewhere, and runs nothing.
An npz holds x uint8 [n, 32, 32, 3] and y [n]; the other data sets are those of the tables, or ``--data WORD=DATA``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.auditing import score_again
from gradveil.core.atomic import write_json
from gradveil.core.progress import Progress
from gradveil.core.reading import read_json
from gradveil.data import DATASETS, ImageSet, MemoryImages, load
from gradveil.lab.reproduce import SCALES, ReproductionPlan, page, plan, reproduction, run_plan
from gradveil.lab.reproduce.landscape import add_lpips
from gradveil.lab.sweeps import MEASURED, ResultFolder, Status


@DATASETS.register("npz")
def npz(_: Progress, *, path: str) -> ImageSet:
    """Images of ten classes, as those of CIFAR-10, from one npz file."""
    like = load("cifar10-samples")
    with np.load(path) as file:
        images, labels = torch.from_numpy(file["x"]).permute(0, 3, 1, 2), torch.from_numpy(file["y"])
    return MemoryImages(
        name=f"npz {path}", images=images.contiguous(), labels=labels.long(), class_names=like.class_names,
        mean=like.mean, std=like.std,
    )  # fmt: skip


class Lines:
    """Every case once it is done, as a line; what it saw goes, for the updates of a large model fill a disk."""

    def __init__(self, planned: ReproductionPlan, out: Path, started: float) -> None:
        self.planned, self.results, self.started = planned, ResultFolder(out), started
        self.printed: set[str] = set()

    def __call__(self, now: Status) -> None:
        for entry in self.planned.study.entries if self.planned.study else ():
            result = None if entry.digest in self.printed else self.results.result(entry.digest)
            if result is not None:
                self.printed.add(entry.digest)
                shutil.rmtree(self.results.case(entry.digest) / "observations", ignore_errors=True)
                row: dict[str, Any] = next((row for row in result["rows"] if row.get("prior_of") is None), {})
                shown = "  ".join(f"{name} {row[name]:.3f}" for name in ("psnr", "ssim", "accuracy") if row.get(name))
                took = self.results.seconds(entry.digest) or 0.0
                say(self.started, f"{took:7.1f} s  {self.planned.reproduction.name}: {entry.title}  {shown}")
        for title, reason in now.failed.items():
            if title not in self.printed:
                self.printed.add(title)
                say(self.started, f"failed: {title}: {reason}")


def say(started: float, text: str) -> None:
    print(f"{time.perf_counter() - started:7.0f}  {text}", flush=True)


def brought(options: argparse.Namespace, name: str) -> dict[str, str]:
    """The data that were given for words which this reproduction has."""
    given = dict(text.split("=", 1) for text in options.data)
    given |= {word: f"npz:path={path}" for word, path in (text.split("=", 1) for text in options.npz)}
    words = {word for table in reproduction(name).tables for part in table.words for word in part}
    return {word: spec for word, spec in given.items() if word in words}


def narrowed(planned: ReproductionPlan, pattern: str) -> ReproductionPlan:
    """Only those lines whose words look like this."""
    lines = [[one for one in each if fnmatchcase(", ".join(one.line), pattern)] for each in planned.lines]
    return replace(planned, lines=tuple(map(tuple, lines)))


def add_scores(planned: ReproductionPlan, out: Path) -> None:
    """LPIPS and what rests on it, for audits and landscapes that were run where there was none."""
    results = ResultFolder(out)
    for path in (out / MEASURED).glob("*.json"):
        found = read_json(path)
        if "codes" in found["figures"].get("each", [{}])[0]:
            write_json(path, found | {"figures": add_lpips(found["fields"], found["figures"])})
    for entry in planned.study.entries if planned.study else ():
        if entry.kind == "audit" and results.result(entry.digest) is not None:
            score_again(results.case(entry.digest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--scale", choices=SCALES, default="paper")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--npz", action="append", default=[], metavar="WORD=FILE")
    parser.add_argument("--data", action="append", default=[], metavar="WORD=DATA")
    parser.add_argument("--out", type=Path, default=Path("reproductions"))
    parser.add_argument("--keep", type=Path, default=os.environ.get("OUT"), help="copy results and pages to here")
    parser.add_argument("--lines", action="append", default=[], metavar="PATTERN", help="run only these, as 'GI, *'")
    parser.add_argument("--limit", type=int, default=0, help="seconds after which to stop; 0: none")
    parser.add_argument("--score", action="store_true", help="run nothing: score what is done anew, and write pages")
    options = parser.parse_args()
    started = time.perf_counter()
    plans = [
        plan(reproduction(name), options.scale, device=options.device, data=brought(options, name))
        for name in options.names
    ]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(options.limit)
    try:
        for planned in plans:
            out = options.out / planned.folder
            if options.score:
                add_scores(planned, out)
            else:
                for pattern in options.lines or ["*"]:
                    run_plan(narrowed(planned, pattern), out, start="here", report=Lines(planned, out, started))
        signal.alarm(0)
    except KeyboardInterrupt:
        say(started, "stopped; finished cases are kept")
    for planned in plans:
        out = options.out / planned.folder
        given = "".join(f" --npz {text}" for text in options.npz) + "".join(f" --data {text}" for text in options.data)
        how = (
            f"PYTHONPATH=src python scripts/reproduce_gpu.py {planned.reproduction.name} --scale {planned.scale}{given}"
        )
        (options.out / f"{planned.reproduction.name}.md").write_text(page(planned, out, how=how if options.npz else ""))
    if options.keep is not None:
        unfinished = shutil.ignore_patterns("observations", ".work", ".lock")
        shutil.copytree(options.out, options.keep, ignore=unfinished, dirs_exist_ok=True)
    say(started, f"done on {options.device}")


if __name__ == "__main__":
    main()
