"""The page of several trainings in a real browser: light and dark, wide and narrow, asking for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser.visits import Open
from gradveil.federated import Training, run_training
from gradveil.report import render_trainings

pytestmark = [pytest.mark.browser, pytest.mark.integration]


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_the_page_shows_every_curve_and_fetches_nothing(width: int, theme: str, tmp_path: Path, visit: Open) -> None:
    specs = ["none", "outpost", "clip:bound=1+noise:sigma=0.1"]
    for number, spec in enumerate(specs):
        case = Training(data="mnist-samples", model="mlp:hidden=8,depth=1", clients=2, rounds=6, defense=spec, lr=0.3)
        run_training(case, tmp_path / str(number))
    page = render_trainings([tmp_path / str(number) for number in range(len(specs))], tmp_path / "page.html")
    seen = visit(page, width=width, theme=theme)
    assert seen.page.locator("figure path.line").count() == 3 * len(specs)
    colors = {
        line.evaluate("e => getComputedStyle(e).stroke") for line in seen.page.locator("td,th").locator(".line").all()
    }
    assert len(colors) == len(specs)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    seen.screenshot(f"trainings-{theme}")
    assert not seen.requests
    assert not seen.complaints
