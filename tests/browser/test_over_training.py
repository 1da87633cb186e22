"""The report of saved exchanges in a real browser: curves by round, pictures by stage, asking for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing.test_observed import IG, case, train
from browser.test_report import COLORS, contrast
from browser.visits import Open
from gradveil.auditing import run_observed
from gradveil.report import render

pytestmark = [pytest.mark.browser, pytest.mark.integration]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings, two attacks, three rounds of two clients."""
    folder = tmp_path_factory.mktemp("over-training")
    taps = tuple(f"{client}@{number}" for number in (1, 2, 40) for client in (0, 1))
    trained = [
        train(folder / name, rounds=40, tap=taps, defense=spec, lr=0.3, evaluate_every=39, checkpoint_every=40)
        for name, spec in (("plain", "none"), ("noisy", "noise:sigma=0.05"))
    ]
    run_observed(case(*trained, attacks=["analytic", IG]), folder / "audit")
    return render(folder / "audit")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_curves_and_pictures_by_round(page: Path, width: int, theme: str, visit: Open) -> None:
    seen = visit(page, width=width, theme=theme)
    section = seen.page.locator("#training")
    assert section.locator("svg.chart").count() == len(section.locator("figcaption").all()) >= 3
    for chart in section.locator("svg.chart").all():
        assert chart.locator("path.line").count() == 4, "two attacks on two trainings"
        assert chart.locator("circle.line").count() == 4 * 3, "each in three rounds"
        assert chart.locator("path.level").count() == 1, "the prior of ig"
    assert (
        len({line.evaluate("e => getComputedStyle(e).stroke") for line in section.locator(".swatch .line").all()}) == 4
    )
    assert seen.page.locator("table.pictures").count() == 2
    assert seen.page.locator("table.pictures").first.locator("tr.truth").count() == 3, "new digits in each round"
    assert all(size == [28, 28] for size in seen.pictures())
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    faint = [text for text, front, back in seen.page.evaluate(COLORS) if contrast(front, back) < 4.5]
    assert faint == []
    assert seen.barriers() == []
    assert (seen.requests, seen.complaints) == ([], [])
    seen.screenshot(f"over-training-{theme}")


def test_rounds_are_in_the_table_and_sort_by_number(page: Path, visit: Open) -> None:
    seen = visit(page)
    seen.page.get_by_role("button", name="Stage").click()
    cells = seen.page.locator("table.results tbody tr > :nth-child(4)").all_inner_texts()
    assert [text.strip() for text in cells] == ["round 40"] * 4 + ["round 2"] * 4 + ["round 1"] * 4 + ["any"]
