"""Audit published defenses with the Gradveil that is installed, one row each: run it with two versions and compare.

    PYTHONPATH=OLD/src python scripts/before_after.py --label before --out rows.jsonl --work DIR
    PYTHONPATH=NEW/src python scripts/before_after.py --label after --out rows.jsonl --work DIR
    python scripts/before_after.py --out rows.jsonl --table

Each audit is the suite of the budget under threat model D. Rows that the file holds already are kept, and an audit that
was interrupted goes on in its folder under ``--work``. ``--table`` prints what the rows say, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

DEFENSES = ("none", "sparsify", "soteria", "precode", "ats", "graddefense", "outpost", "censor", "dcs2")


def audited(defense: str, label: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One row; read from the file that every version writes, because what the call returns is not the same in all."""
    import gradveil  # the version that is compared; a table is made without any
    from gradveil.auditing import make_case, run_case

    fields = {"images": asked.images, "threat": "D", "budget": asked.budget, "device": asked.device}
    source = Path(gradveil.__file__).parent
    folder = asked.work / f"{label}-{asked.budget}-{asked.images}-{defense}"
    started = time.process_time()
    run_case(make_case({**fields, "defenses": (defense,)}), folder, resume=folder.exists())
    audit = json.loads((folder / "audit.json").read_text())
    (verdict,) = audit["verdicts"]
    names = ("grade", "identified", "identified_interval", "attack", "round", "images", "candidates", "flags")
    columns = ("attack", "round", "ranked_first", "identified", "psnr", "label_accuracy", "strategy")
    return {
        "label": label,
        "commit": subprocess.check_output(["git", "-C", source, "rev-parse", "--short", "HEAD"], text=True).strip(),
        "budget": asked.budget,
        "defense": defense,
        **{name: verdict.get(name) for name in names},
        "rows": [{name: row.get(name) for name in columns} for row in audit["rows"] if row["prior_of"] is None],
        "processor_seconds": round(time.process_time() - started, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line for each defense and number of images, what was measured before beside what is now."""
    lines = ["| defense | images | before | after | `informed` | `identify` | `replay` |", "| --- |" + " ---: |" * 6]
    for images, defense in dict.fromkeys((row["images"], row["defense"]) for row in rows):
        found = {row["label"]: row for row in rows if (row["images"], row["defense"]) == (images, defense)}
        grades = [grade(found.get(label)) for label in ("before", "after")]
        shares = [f"{share(found.get('before'), name)}, {share(found.get('after'), name)}" for name in SHOWN]
        lines.append(f"| `{defense}` | {images} | {' | '.join(grades)} | {' | '.join(shares)} |")
    return "\n".join(lines)


SHOWN = ("informed", "identify", "replay")


def grade(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    where = f" in round {row['round']}" if row["round"] else ""
    return f"{row['grade']}, {row['identified']:.0%} by `{row['attack']}`{where}"


def share(row: dict[str, Any] | None, attack: str) -> str:
    """What an attack reaches in the worst round: the share ranked first or, where it rebuilds, identified.

    Nothing, where ``replay`` could not afford a reply: the ranking is that of ``identify`` then.
    """
    rows = [] if row is None else [one for one in row["rows"] if one["attack"].partition(":")[0] == attack]
    rows = [one for one in rows if "nothing was run" not in one["strategy"]]
    reached = [one["identified"] if one["ranked_first"] is None else one["ranked_first"] for one in rows]
    return f"{max(reached):.0%}" if reached else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", choices=("before", "after"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("before-after"), help="folder of the audits")
    parser.add_argument("--budget", default="quick", choices=("quick", "standard"))
    parser.add_argument("--defense", action="append", default=[], help="instead of all; repeatable")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.table:
        print(table(rows))
        return
    if asked.label is None:
        parser.error("--label is before or after")
    done = {(row["label"], row["budget"], row["images"], row["defense"]) for row in rows}
    for defense in asked.defense or DEFENSES:
        if (asked.label, asked.budget, asked.images, defense) not in done:
            row = audited(defense, asked.label, asked)
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row)


if __name__ == "__main__":
    main()
