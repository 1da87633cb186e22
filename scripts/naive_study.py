"""What `replay` reaches against naive defenses, and the grade that it alone gives them: one JSON object a line.

    OMP_NUM_THREADS=1 python scripts/naive_study.py --out rows.jsonl [--work DIR] [--images N] [NAME ...]
    python scripts/naive_study.py --out rows.jsonl --table

Names are those of tests/naive.py. Every defense is an object that nobody registered, audited by `replay` as suites have
it, in all rounds that an audit looks at. Rows that the file holds are kept, an interrupted audit goes on in its folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from gradveil import models
from gradveil.attacks import ATTACKS
from gradveil.auditing import make_case
from gradveil.auditing.run import run
from gradveil.auditing.sources import Simulation
from gradveil.data import load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from naive import HELD_OUT, NAIVE

DATA, MAKERS = load("cifar10-samples"), {**NAIVE, **HELD_OUT}


def audited(name: str, images: int, work: Path) -> dict[str, Any]:
    case, built = make_case({"images": images, "threat": "D"}), {name: MAKERS[name]()}
    case = case.model_copy(update={"defenses": (name,), "attacks": ("replay",)})
    clients = Simulation(case, DATA, lambda: models.build(case.model, DATA.domain, seed=case.seed))
    folder, started = work / f"{images}-{name}", time.process_time()
    plan = clients.plan(built, {"replay": ATTACKS.build("replay", case.effort())})
    audit = run(plan, folder, resume=folder.exists())
    (verdict,) = audit.verdicts
    rounds = [
        {
            "round": row.round or 1,
            "ranked_first": row.ranked_first,
            "member": row.member.found if row.member is not None else None,
            "strategy": row.strategy,
        }
        for row in audit.rows
        if not row.is_prior
    ]
    return {
        "defense": name,
        "held_out": name in HELD_OUT,
        "images": images,
        "candidates": verdict.candidates,
        "grade": verdict.grade,
        "flags": verdict.flags,
        "recognised": verdict.ranked_first,
        "interval": verdict.identified_interval,
        "round": verdict.round,
        "rounds": rounds,
        "processor_seconds": round(time.process_time() - started, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| defense | recognised by `replay` | compared by | grade | flags |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda row: list(MAKERS).index(row["defense"])):
        title = f"*held out:* {row['defense']}" if row["held_out"] else row["defense"]
        shares = [f"{one['ranked_first']:.0%}" for one in row["rounds"]]
        if len(shares) > 1:
            shares = [f"{share} (round {one['round']})" for share, one in zip(shares, row["rounds"], strict=True)]
        ways = dict.fromkeys(one["strategy"].removeprefix("replayed, compared by ") for one in row["rounds"])
        cells = (title, ", ".join(shares), "; ".join(ways), row["grade"], ", ".join(row["flags"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("naive"), help="folder of the audits")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.table:
        print(table(rows))
        return
    done = {(row["defense"], row["images"]) for row in rows}
    for name in asked.names or MAKERS:
        if (name, asked.images) not in done:
            row = audited(name, asked.images, asked.work)
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row)


if __name__ == "__main__":
    main()
