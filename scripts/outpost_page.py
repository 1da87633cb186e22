"""Writes the tables of docs/results/outpost-claims.md anew from the rows of scripts/outpost_claims.py.

    python scripts/outpost_page.py

The table of a study stands below its mark, such as ``<!-- seeds -->``; the words around it are written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs/results"
PAGE, ROWS = FOLDER / "outpost-claims.md", FOLDER / "outpost-claims.jsonl"
COLUMNS = {
    "psnr": ("PSNR", ".1f"),
    "best_psnr": ("best", ".1f"),
    "ssim": ("SSIM", ".2f"),
    "identified": ("identified", "g"),
    "images": ("of", "d"),
    "objective": ("objective", ".2g"),
    "best_of_starts": ("PSNR, best of the starts", ".1f"),
    "arrived": ("starts above 20 dB, by image", ""),
    "accuracy": ("accuracy", ".1%"),
    "length": ("length", ".2g"),
    "risk": ("risk", ".3f"),
    "variance": ("variance", ".2g"),
    "roughness": ("roughness", ".2f"),
    "psnrs_of_cats": ("PSNR of the cats", ""),
    "cosine": ("cosine", ".2f"),
    "below": ("below the classifier", ".2f"),
    "questions": ("questions", "d"),
    "auc": ("AUC", ".3f"),
    "right": ("right among the first half", ".1%"),
    "shared_empirical": ("shared with the empirical", ".0%"),
    "shared_batch": ("shared with the batch's", ".0%"),
    "parameters": ("parameters", ",d"),
    "ratio": ("times a step", ".2f"),
}
"""By name of a figure: the heading of its column, and its format."""
SHOWN = {
    "seeds": "psnr best_of_starts arrived accuracy",
    "spread": "variance psnr ssim identified images",
    "rounds": "accuracy length risk psnr identified images",
    "prior": "psnr ssim identified images roughness",
    "statistics": "psnr ssim identified images",
    "batches": "psnr best_psnr ssim identified images",
    "epochs": "objective psnr ssim identified images",
    "resnet50": "objective psnr ssim identified images",
    "transformer": "accuracy objective psnr ssim identified images",
    "release": "objective psnr ssim identified images",
    "places": "cosine psnr ssim identified images",
    "fisher": "parameters shared_empirical shared_batch",
    "delay": "ratio",
    "production": "auc right psnr best_psnr ssim identified images",
    "fishing": "questions cosine below psnr ssim identified",
    "fishing_resnet": "questions cosine below psnr ssim identified",
    "fishing_honest": "psnrs_of_cats best_psnr psnr identified images",
    "fishing_steps": "cosine psnr identified",
    "fishing_queries": "questions cosine below",
    "fishing_vit": "questions cosine psnr ssim identified psnrs_of_cats",
}


def table(study: str, rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a study in Markdown: what each is about, and the figures that are shown of it."""
    own = [row for row in rows if row["study"] == study]
    about = list(dict.fromkeys(key for row in own for key in row if key not in ("study", "found")))
    shown = [key for key in SHOWN[study].split() if any(key in row["found"] for row in own)]
    lines = [[key.replace("_", " ") for key in about] + [COLUMNS[key][0] for key in shown]]
    lines.append(["---"] * len(about) + ["---:"] * len(shown))
    for row in own:
        cells = [_cell(row.get(key, ""), "") for key in about]
        lines.append(cells + [_cell(row["found"].get(key, ""), COLUMNS[key][1]) for key in shown])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object, how: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, str):
        return f"`{value}`" if ":" in value else value
    return format(value, how)


def filled(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page with the table of each study below its mark."""
    return re.sub(r"<!-- (\w+) -->\n(\|.*\n)*", lambda mark: f"<!-- {mark[1]} -->\n{table(mark[1], rows)}", page)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), rows()))
