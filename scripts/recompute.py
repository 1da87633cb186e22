"""Recomputes figures of the reproduction pages from the rows behind them, without a line of Gradveil.

    python scripts/recompute.py --count 100 --seed 1

A page of ``docs/results/paper`` or ``small`` has tables whose columns read ``PSNR: paper / text / release``. Each of
our figures is looked for in the packed results: the mean over the images of the case whose title is that line. Where
two lines share a case, it may be that of any case.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results"
METRICS = {"MSE": "mse", "PSNR": "psnr", "SSIM": "ssim", "LPIPS": "lpips", "identified": "identified"}


@cache
def packed(page: Path) -> list[dict[str, Any]]:
    path = page.parent / "cases" / f"{page.stem}-{page.parent.name}" / "results.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines() if path.exists() else []
    return [read["result"] for read in map(json.loads, lines) if "result" in read]


def values(result: dict[str, Any], metric: str) -> list[float]:
    """The mean over images of each row of a case that is not of a prior alone."""
    found = []
    for row in result.get("rows", []):
        each = [one[metric] for one in row.get("per_image", []) if one.get(metric) is not None]
        if each and row.get("prior_of") is None:
            found.append(sum(each) / len(each))
    return found


def figures(page: Path) -> Iterator[tuple[str, str, str]]:
    """Title of the line, metric, and our figure as printed."""
    head: list[str] = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells or set(line) <= set("|-: "):
            head = head if cells else []
        elif not head:
            head = cells
        else:
            words = [cells[i] for i, _ in takewhile(lambda column: ":" not in column[1], enumerate(head))]
            for name, cell in zip(head, cells, strict=False):
                metric, _, settings = name.partition(": ")
                parts = zip(settings.split(" / "), cell.split(" / "), strict=False)
                for which, figure in parts if metric in METRICS else ():
                    if which in ("text", "release", "ours") and re.fullmatch(r"-?[\d.]+(e-?\d+)?", figure):
                        yield ", ".join(words), METRICS[metric], figure


def agrees(figure: str, value: float) -> bool:
    """The printed figure is that value, rounded to the digits that are printed."""
    digits = len(figure.partition(".")[2]) if "e" not in figure else 12
    return abs(float(figure) - value) <= 0.51 * 10.0**-digits


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    pages = sorted([*RESULTS.glob("paper/*.md"), *RESULTS.glob("small/*.md")])
    every = [(page, *one) for page in pages for one in figures(page)]
    some = random.Random(options.seed).sample(every, min(options.count, len(every)))
    wrong = 0
    for page, title, metric, figure in some:
        results = packed(page)
        own = [result for result in results if result["title"] == title] or results
        if not any(agrees(figure, value) for result in own for value in values(result, metric)):
            wrong += 1
            print(f"{page.relative_to(RESULTS)}: {title}: {metric} {figure} is in no row")
    print(f"{len(some) - wrong} of {len(some)} figures, drawn from {len(every)}, follow from their rows")
    sys.exit(1 if wrong or not some else 0)


if __name__ == "__main__":
    main()
