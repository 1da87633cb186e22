"""Recomputes figures of the reproduction pages from the rows behind them, without a line of Gradveil.

    python scripts/recompute.py --count 100 --seed 1

A page of ``docs/results/paper`` or ``small`` has tables whose columns read ``PSNR: paper / text / release``. Each of
our figures has to be one that follows from the packed rows of that page.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
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
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def mean(values: list[float]) -> list[float]:
    """None of no values."""
    return [sum(values) / len(values)] if values else []


def values(page: Path, metric: str) -> list[float]:
    """What a figure of the page can be: of each case the mean over its images, or over the first of each batch.

    Where a case was repeated with other seeds it can be the mean over them. GGL's tables are of pixels in [-1, 1].
    """
    found, seeds = list[float](), dict[str, list[float]]()
    for one in packed(page):
        found += [one["measured"]["figures"][metric]] if metric in one.get("measured", {}).get("figures", {}) else []
        result = one.get("result", {})
        for row in result.get("rows", []):
            each = [image for image in row.get("per_image", []) if image.get(metric) is not None]
            if row.get("prior_of") is None and each:
                size = result["case"]["batch_size"]
                all_of_them = mean([image[metric] for image in each])
                found += all_of_them + mean([image[metric] for image in each if image["index"] % size == 0])
                seeds.setdefault(result["title"].partition(", seed ")[0], []).extend(all_of_them)
    found += [value for each in seeds.values() for value in mean(each)]
    if page.stem.startswith("ggl"):
        found += [value - 20 * math.log10(2) if metric == "psnr" else 4 * value for value in found]
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
    mantissa, _, exponent = figure.partition("e")
    return abs(float(figure) - value) <= 0.51 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


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
        if not any(agrees(figure, value) for value in values(page, metric)):
            wrong += 1
            print(f"{page.relative_to(RESULTS)}: {title}: {metric} {figure} is in no row")
    print(f"{len(some) - wrong} of {len(some)} figures, drawn from {len(every)}, follow from their rows")
    sys.exit(1 if wrong or not some else 0)


if __name__ == "__main__":
    main()
