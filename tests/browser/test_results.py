"""The table of results in Chromium: sorted and filtered, by mouse and by keyboard, and saying so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from browser.visits import Open, Visit
from gradveil.report import render
from report.saved_audit import edit_audit, write_audit

pytestmark = [pytest.mark.browser, pytest.mark.integration]


def column(visit: Visit, number: int) -> list[str]:
    cells = visit.page.locator(f"table.results tbody tr > :nth-child({number})")
    return [text.split("\n")[0] for text in cells.all_inner_texts()]


def sorting(visit: Visit) -> dict[str, str]:
    """Which headings of the results claim to be sorted, and how."""
    heads = visit.page.locator("table.results thead th[aria-sort]")
    return {
        re.sub(r"\W*\(.*|\W+$", "", head.inner_text()): head.get_attribute("aria-sort") or "" for head in heads.all()
    }


def shown_rows(visit: Visit) -> list[tuple[str, str]]:
    """Defense and attack of the rows that are not filtered out."""
    rows = visit.page.locator("table.results tbody tr").filter(visible=True)
    return [(row.locator("> *").nth(0).inner_text(), row.locator("> *").nth(1).inner_text()) for row in rows.all()]


def test_sorts_by_click(visit: Open, report: Path) -> None:
    seen = visit(report)
    psnr = seen.page.get_by_role("button", name=re.compile("PSNR"))
    psnr.click()
    values = [float(text) for text in column(seen, 4)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 2
    assert sorting(seen) == {"PSNR": "descending"}
    psnr.click()
    assert [float(text) for text in column(seen, 4)] == sorted(values)
    assert sorting(seen) == {"PSNR": "ascending"}


def test_sorts_by_keyboard_and_says_so(visit: Open, report: Path) -> None:
    seen = visit(report)
    seen.page.get_by_role("button", name="Defense").focus()
    seen.page.keyboard.press("Enter")
    assert column(seen, 1) == sorted(column(seen, 1), key=str.lower)
    seen.page.keyboard.press("Tab")
    seen.page.keyboard.press("Space")
    assert sorting(seen) == {"Attack": "ascending"}
    assert column(seen, 2) == sorted(column(seen, 2))
    assert seen.page.inner_text("#results-status") == "Sorted by Attack, ascending"


def test_missing_values_stay_last(visit: Open, tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    rows = edit_audit(folder)["rows"]
    rows[1]["psnr"] = None
    edit_audit(folder, rows=rows)
    seen = visit(render(folder))
    for _ in range(2):
        seen.page.get_by_role("button", name=re.compile("PSNR")).click()
        assert column(seen, 4)[-1] == "n/a"


def test_filters_by_defense_and_attack(visit: Open, wide_report: Path) -> None:
    seen = visit(wide_report)
    every = shown_rows(seen)
    assert len(every) == 3 * 2 + 2
    seen.page.get_by_role("combobox", name="Defense").select_option("noise:sigma=0.1")
    assert shown_rows(seen) == [row for row in every if row[0] == "noise:sigma=0.1"]
    assert seen.page.inner_text("#results-status") == "2 of 8 rows shown"
    seen.page.get_by_role("combobox", name="Attack").select_option("dlg")
    assert shown_rows(seen) == [("noise:sigma=0.1", "dlg")]
    seen.page.get_by_role("button", name=re.compile("PSNR")).click()
    assert shown_rows(seen) == [("noise:sigma=0.1", "dlg")], "sorting shows nothing that was filtered out"
    seen.page.get_by_role("button", name="Show all").click()
    assert sorted(shown_rows(seen)) == sorted(every)


def test_filters_by_flag_and_by_keyboard(visit: Open, wide_report: Path) -> None:
    seen = visit(wide_report)
    flagged = seen.page.locator(
        "table.results tbody tr", has=seen.page.locator("a[data-term='prior-only as good']")
    ).count()
    chosen = seen.page.get_by_role("combobox", name="Flags")
    chosen.focus()
    seen.page.keyboard.type("prior")
    assert chosen.input_value() == "prior-only as good"
    assert len(shown_rows(seen)) == flagged > 0
    seen.page.keyboard.press("Tab")
    seen.page.keyboard.press("Enter")
    assert len(shown_rows(seen)) == 8
