"""Sets the figures of tables from the rows that they rest on, or says which differ.

    python scripts/figures.py              # exit 1 if a cell is not what its rows say
    python scripts/figures.py --write

A table that rests on rows has a comment above it, in YAML:

    <!-- figures
    from: ../results/pages/informed.jsonl     # one JSON object a line, or .jsonl.gz; several files as a list
    where: {prior_of: null}                   # which rows are meant at all
    line: [defense]                           # fields that the first columns hold, plain or in backticks beside words
    cells:                                    # one for each other column: which row, and how it is written
      - {attack: ig} -> {hits} of {images}
      - {attack: ig} -> {psnr:.1f} dB
    -->

Cells of lines without such a row are left empty.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"<!-- figures\n(.*?)-->\n+((?:\|[^\n]*\n)+)", re.DOTALL)


@cache
def rows_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def fits(row: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Values compare as text, so that a cell such as `16` finds the number. A field that a row lacks is null.

    Of a list any will do.
    """
    meant = {name: value if isinstance(value, list) else [value] for name, value in wanted.items()}
    return all(str(row.get(name)) in map(str, values) for name, values in meant.items())


def written(table: str, said: dict[str, Any], page: Path) -> str:
    """The table with the figures of its rows."""
    names = said["from"] if isinstance(said["from"], list) else [said["from"]]
    rows = [row for name in names for row in rows_of((page.parent / name).resolve())]
    head, rule, *lines = table.splitlines()
    parts = [text.split(" -> ", 1) for text in said["cells"]]
    made = [head, rule]
    for line in lines:
        keys = cells_of(line)[: len(said["line"])]
        meant = [re.sub(r".*?`([^`]*)`.*", r"\1", key) for key in keys]
        wanted = said.get("where", {}) | dict(zip(said["line"], meant, strict=True))
        cells = []
        for which, form in parts:
            found = [row for row in rows if fits(row, wanted | yaml.safe_load(which))]
            if len(found) > 1:
                raise SystemExit(f"{page.relative_to(ROOT)}: {len(found)} rows fit {wanted | yaml.safe_load(which)}")
            cells.append(form.format(**found[0]) if found else "")
        made.append(f"| {' | '.join([*keys, *cells])} |")
    return "\n".join(made) + "\n"


def tables(page: Path) -> Iterator[tuple[str, str]]:
    """Each table of a page that names its rows, as it is and as it should be."""
    for match in TABLE.finditer(page.read_text()):
        yield match[2], written(match[2], yaml.safe_load(match[1]), page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="default: all of docs")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    wrong = 0
    for page in options.pages or sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        for old, new in tables(page.resolve()):
            if old != new:
                wrong += 1
                text = text.replace(old, new)
                print(f"{page}: a table that begins with {old.splitlines()[0]}")
        if options.write:
            page.write_text(text)
    sys.exit(1 if wrong and not options.write else 0)


if __name__ == "__main__":
    main()
