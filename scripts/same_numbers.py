"""Records what audits, a training, a sweep and a reproduction give, and compares a later tree with it, digit by digit.

    python scripts/same_numbers.py record before.json
    python scripts/same_numbers.py compare before.json

Everything runs on one CPU thread with fixed strategies, so that nothing depends on which one was the fastest today.
Compare on the machine that recorded: another processor rounds otherwise. The script goes through the command line and
the files that it writes, and takes times, paths and words out of them. To compare with an older tree, run this file
with that tree's Python.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "GRADVEIL_OFFLINE": "1"}

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gradveil
from gradveil.data import load

SEARCH = "iterations=8,restarts=2,strategy=loop"
PLAIN = [f"ig:{SEARCH}", f"gi:{SEARCH}", f"idlg:{SEARCH}", f"informed:{SEARCH}", f"gifd:{SEARCH}"]
DEFENSES = (
    "none", "noise:sigma=0.01", "clip:bound=1", "sparsify:rate=0.8", "soteria:rate=0.5", "precode:size=32", "ats",
    "dp:sigma=0.1", "censor:trials=4", "outpost", "graddefense", "dcs2plus:iterations=5",
    "clip:bound=1+noise:sigma=0.1",
)  # fmt: skip
AUDITS = {
    "gradients": {"defenses": DEFENSES, "attacks": ["identify", *PLAIN], "threat": "E", "images": 2},
    "batches": {
        "defenses": ("none", "censor:trials=4"), "attacks": ["identify", f"ig:{SEARCH}"], "threat": "D+labels",
        "images": 4, "batch_size": 2,
    },
    "local steps": {
        "defenses": ("none", "noise:sigma=0.001"), "attacks": [f"sme:{SEARCH}", f"ig:{SEARCH}"], "threat": "C",
        "images": 2, "batch_size": 2, "recipe": {"sends": "delta", "epochs": 2, "batch_size": 1, "lr": 0.01},
    },
    "active": {
        "defenses": ("none", "noise:sigma=0.0001"), "attacks": ["imprint:bins=8", "trap", "fishing:queries=4"],
        "threat": "F", "images": 2, "batch_size": 2, "model": "mlp",
    },
}  # fmt: skip
TRAINING = {
    "data": "mnist-samples", "model": "mlp", "clients": 3, "rounds": 4, "batch_size": 8, "defense": "dp:sigma=0.5",
    "tap": ["0@*"], "device": "cpu", "side_by_side": "false", "threat": "D",
}  # fmt: skip
STUDY = {
    "base": {"images": 1, "gallery": 10, "attacks": [f"ig:{SEARCH}"], "budget": "quick"},
    "grid": {"seed": [0, 1], "defenses": ["none", "noise:sigma=0.1"]},
}
SKIPPED = ("second", "time", "path", "file", "version", "environment", "strategy", "way", "sentence", "flags", "case")
"""A number below a key with one of these in it is not compared."""


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, with the way to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not any(word in key for word in SKIPPED):
                yield from numbers(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers(inner, f"{path}/{place}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def command(*words: str | Path) -> None:
    print("gradveil", *words, file=sys.stderr)
    subprocess.run([sys.executable, "-m", "gradveil.cli.main", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def read(path: Path) -> Any:
    return as_version_1(json.loads(path.read_text()))


def as_version_1(value: Any) -> Any:
    """An audit of version 2 with its numbers where version 1 had them, to compare with what older trees recorded."""
    if not isinstance(value, dict) or value.get("version") != 2:
        return value
    for row in value["rows"]:
        row |= {**row["log"], "chance": row.pop("at_random")}
    for verdict in value["verdicts"]:
        verdict["chance"] = verdict.pop("at_random")
        for newer in ("rebuilt", "recognised", "member", "labels", "ceiling", "ceiling_of_run"):
            verdict.pop(newer)
    return value


def recorded(folder: Path) -> dict[str, Any]:
    """All numbers by the name of what gave them."""
    found: dict[str, Any] = {}
    for name, case in AUDITS.items():
        whole = {
            "data": "cifar10-samples",
            "model": "lenet:init=wide",
            "gallery": 10,
            "budget": "quick",
            "device": "cpu",
        }
        (folder / "case.yaml").write_text(json.dumps(whole | case))
        command("audit", folder / "case.yaml", "--out", folder / name)
        found[f"audit of {name}"] = read(folder / name / "audit.json")
    (folder / "training.yaml").write_text(json.dumps(TRAINING))
    command("train", folder / "training.yaml", "--out", folder / "training")
    found["training"] = read(folder / "training" / "train.json")
    command(
        "audit", "--observations", folder / "training", "--attack", f"ig:{SEARCH}", "--attack",
        "identify:candidates=mnist-samples", "--budget",
        "quick", "--gallery", "10", "--device", "cpu", "--out", folder / "saved",
    )  # fmt: skip
    found["saved audit"] = read(folder / "saved" / "audit.json")
    (folder / "study.yaml").write_text(json.dumps(STUDY))
    command("sweep", folder / "study.yaml", "--out", folder / "sweep", "--workers", "1")
    results = sorted((folder / "sweep").rglob("audit.json"))
    found["sweep"] = {str(path.relative_to(folder / "sweep").parent): read(path) for path in results}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10))
    batch = load("mnist-samples").batch(range(3))
    attacks = ["analytic", f"ig:{SEARCH}", "identify"]
    own: Any = gradveil.audit(model, batch, defense=["none", "noise:sigma=0.01"], attack=attacks, threat="D")
    found["own audit"] = own if isinstance(own, dict) else as_version_1(own.as_json())
    command("reproduce", "censor-7", "--scale", "small", "--workers", "1", "--out", folder / "reproduction")
    results = sorted((folder / "reproduction").rglob("audit.json"))
    found["reproduction"] = {str(path.relative_to(folder / "reproduction").parent): read(path) for path in results}
    empty = [name for name, value in found.items() if not any(numbers(value))]
    if empty:
        sys.exit(f"no numbers were found of: {', '.join(empty)}")
    return {f"{name}{path}": number for name, value in found.items() for path, number in numbers(value)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        now = recorded(Path(folder))
    if options.what == "record":
        options.file.write_text(json.dumps(now, indent=0))
        print(f"{len(now)} numbers recorded in {options.file}")
        return
    before = read(options.file)
    odd = [path for path in sorted(before.keys() | now.keys()) if before.get(path) != now.get(path)]
    for path in odd[:40]:
        print(f"{path}: {before.get(path)} before, {now.get(path)} now")
    print(f"{len(before)} numbers before, {len(now)} now, {len(odd)} differ")
    sys.exit(1 if odd else 0)


if __name__ == "__main__":
    main()
