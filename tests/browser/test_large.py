"""The largest report that is promised, 15 defenses under 10 attacks on 20 images: its weight, and how soon it opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser.visits import Open
from gradveil.report import render
from report.saved_audit import write_audit

pytestmark = pytest.mark.slow

LARGEST_BYTES = 15_000_000
LONGEST_MS = 3_000

# From the start of the navigation to the end of loading or the first paint, whichever is later.
OPENED = """
() => Math.max(performance.getEntriesByType("navigation")[0].loadEventEnd,
               ...performance.getEntriesByType("paint").map((entry) => entry.startTime))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of 32 pixels a side in more and more noise, which compresses worst."""
    defenses, attacks = [f"noise:sigma={d}" for d in range(15)], [f"attack{a}" for a in range(10)]
    return render(write_audit(tmp_path_factory.mktemp("large"), defenses=defenses, attacks=attacks, images=20))


def test_it_keeps_its_weight(large: Path) -> None:
    assert large.stat().st_size <= LARGEST_BYTES
    assert "reduced to 128 colors" in large.read_text()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_it_opens_within_three_seconds(visit: Open, large: Path, width: int) -> None:
    """The best of three: what else runs on this machine is no fault of the page."""
    taken = []
    for _ in range(3):
        seen = visit(large, width=width)
        seen.page.wait_for_timeout(500)  # loading ends after the event that the visit waited for
        taken.append(seen.page.evaluate(OPENED))
        assert (seen.requests, seen.complaints) == ([], [])
    assert 0 < min(taken) <= LONGEST_MS


@pytest.mark.browser
def test_all_its_pictures_are_there(visit: Open, large: Path) -> None:
    """Also those that were not decoded on opening."""
    pictures = visit(large).pictures()
    assert len(pictures) > 20 * 15 * (1 + 10)
    assert all(size == [32, 32] for size in pictures)
