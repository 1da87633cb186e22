"""Audits and trainings behind the tables of pages; one JSON object a row. Studies: docs/results/pages/studies.yaml.

    python scripts/page_rows.py informed aware --device cuda --out docs/results/pages

`scripts/figures.py` sets the tables from these rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from gradveil.auditing import make_case
from gradveil.auditing.run import run_case
from gradveil.federated import Training
from gradveil.federated.run import run_training

STUDIES = Path(__file__).parents[1] / "docs" / "results" / "pages" / "studies.yaml"
USUAL = {"data": "cifar10-samples", "model": "lenet:init=wide", "unfit": "leave out"}
KEPT = ("defense", "attack", "prior_of", "round", "threat", "images", "gallery", "psnr", "identified", "identified_by",
        "ranked_first", "label_accuracy", "seconds")  # fmt: skip


def rows(name: str, fields: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """What the audit of a study found, flat, with each image's PSNR and whether it was picked out of the list."""
    with tempfile.TemporaryDirectory() as folder:
        audit = run_case(make_case({**USUAL, **fields, "device": device}), Path(folder) / name)
    said = {key: fields.get(key) for key in ("model", "batch_size", "recipe") if key in fields}
    flat = []
    for row in audit.model_dump(mode="json")["rows"]:
        each = row["per_image"]
        hits = sum(one["identified"] for one in each)
        flat.append({
            "study": name, **said, **{key: row[key] for key in KEPT}, "hits": hits,
            "first": None if row["ranked_first"] is None else round(row["ranked_first"] * row["images"]),
            "psnrs": [round(one["psnr"], 2) for one in each],
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        })  # fmt: skip
    return flat


def trained(name: str, fields: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """Accuracy after every round, and what the defense logged in the last, for each defense of a study."""
    flat = []
    for defense in fields["defenses"]:
        case = Training(**{**fields["train"], "defense": defense, "device": device, "evaluate_every": 1})
        with tempfile.TemporaryDirectory() as folder:
            rounds = run_training(case, Path(folder) / name)["rows"]
        flat.append({
            "study": name, **fields["train"], "defense": defense, "last": rounds[-1]["accuracy"],
            "first": rounds[0]["accuracy"], "accuracies": [one["accuracy"] for one in rounds],
            "logged": rounds[-1]["log"], "seconds": round(sum(one["seconds"] for one in rounds), 1),
        })  # fmt: skip
        print(json.dumps(flat[-1]), flush=True)
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = yaml.safe_load(STUDIES.read_text())
    parser.add_argument("names", nargs="+", choices=sorted(studies))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    options = parser.parse_args()
    for name in options.names:
        found = (trained if "train" in studies[name] else rows)(name, studies[name], options.device)
        text = "".join(json.dumps(row) + "\n" for row in found)
        (options.out / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(found)} rows", flush=True)


if __name__ == "__main__":
    main()
