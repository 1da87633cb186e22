"""The published figures on updates that hold nothing are those of the committed rows, and within their bar."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = ("verdict", "rebuilt", "recognised", "member", "labels")
BAR = 0.05


def test_the_table_of_false_alarms_is_that_of_the_rows() -> None:
    with gzip.open(DOCS / "results/null-calibration.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    page = (DOCS / "verdict.md").read_text()
    for size in (1, 8):
        own = [row for row in rows if row["batch_size"] == size]
        shares = [sum(row["above_chance"][name] is True for row in own) / len(own) for name in COLUMNS]
        cells = [size, sum(row["updates"] for row in own), len(own), *(f"{share:.1%}" for share in shares)]
        assert f"| {' | '.join(map(str, cells))} |" in page
        assert max(shares) <= BAR
    assert {row["kind"] for row in rows} == {"zeros", "noise", "somebody else"}
    attacks = {one["attack"].partition(":")[0] for row in rows for one in row["rows"]} - {"prior-only"}
    assert attacks == {"informed", "identify", "replay", "ig", "fingerprint", "ggl"}
