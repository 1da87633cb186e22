"""Audit published defenses with the Gradveil that is installed, one row each: run it with two versions and compare.

    PYTHONPATH=OLD/src python scripts/before_after.py --label before --out rows.jsonl
    PYTHONPATH=NEW/src python scripts/before_after.py --label after --out rows.jsonl

Rows that the file holds already are kept. ``--attack`` runs some attacks instead of the whole suite.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from gradveil.auditing import make_case, run_case

DEFENSES = ("none", "censor", "outpost", "soteria", "precode", "graddefense", "dcs2", "ats", "sparsify")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", required=True, help="before or after")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="quick", choices=("quick", "standard"))
    parser.add_argument("--attack", action="append", default=[], help="instead of the suite; repeatable")
    parser.add_argument("--defense", action="append", default=[], help="instead of all; repeatable")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    found = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    done = {(row["label"], row["budget"], row["defense"]) for row in found}
    for defense in asked.defense or DEFENSES:
        if (asked.label, asked.budget, defense) in done:
            continue
        fields = {"images": asked.images, "threat": "D", "budget": asked.budget, "device": asked.device}
        case = make_case({**fields, "defenses": (defense,), "attacks": tuple(asked.attack)})
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            audit = run_case(case, Path(folder))
        verdict = audit.verdicts[0]
        rows = [row for row in audit.rows if row.prior_of is None]
        line = {
            "label": asked.label, "budget": asked.budget, "defense": defense, "images": asked.images,
            "attacks": [row.attack for row in rows], "grade": verdict.grade, "identified": verdict.identified,
            "interval": verdict.identified_interval, "worst": verdict.attack, "round": verdict.round,
            "ranked_first": {row.attack: row.ranked_first for row in rows if row.ranked_first is not None},
            "seconds": round(time.perf_counter() - started, 1),
        }  # fmt: skip
        with asked.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line)


if __name__ == "__main__":
    main()
