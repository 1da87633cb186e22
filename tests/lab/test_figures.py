"""Figures that pages print follow from the rows that are committed with them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figures, recompute = script("figures"), script("recompute")
MARKED = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "<!-- figures" in page.read_text()]


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_marked_table_says_what_its_rows_say(page: Path) -> None:
    found = list(figures.tables(page))
    assert len(found) == page.read_text().count("<!-- figures")  # none is too spoilt to be read
    for printed, from_rows in found:
        assert printed == from_rows


def test_a_wrong_figure_is_seen(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"defense": "none", "psnr": 21.26}) + "\n")
    page = tmp_path / "page.md"
    said = '<!-- figures\nfrom: rows.jsonl\nline: [defense]\ncells: ["{} -> {psnr:.1f} dB"]\n-->\n'
    page.write_text(said + "| defense | PSNR |\n| --- | ---: |\n| `none` | 21.4 dB |\n| `dp` | |\n")
    ((printed, from_rows),) = figures.tables(page)
    assert printed != from_rows
    assert from_rows.splitlines()[2:] == ["| `none` | 21.3 dB |", "| `dp` |  |"]


def test_figures_of_reproductions_follow_from_their_rows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        recompute.main(["--count", "100", "--seed", "7"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert printed.splitlines()[-1].startswith("100 of 100")
