"""The report of a real audit, from the attack to the page, opened in Chromium at both widths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from browser.visits import Open
from gradveil.data import load

pytestmark = [pytest.mark.browser, pytest.mark.integration]

WIDTHS = (1280, 400)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_real_report_opens_clean_and_fits(visit: Open, audited: Path, width: int) -> None:
    seen = visit(audited / "report.html", width=width)
    assert (
        seen.pictures() == [[32, 32]] * 20
    )  # four private images, each by how much it leaks, as it is, under two defenses, and by chance
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    assert (seen.requests, seen.complaints) == ([], [])
    seen.screenshot(f"real-{width}")


def test_a_real_report_shows_what_was_measured(visit: Open, audited: Path) -> None:
    audit = json.loads((audited / "audit.json").read_text())
    page = visit(audited / "report.html").page
    text = page.inner_text("main")
    for verdict in audit["verdicts"]:
        assert verdict["sentence"] in text
    cells = page.locator("table.results tbody tr").all_inner_texts()
    for row, shown in zip(audit["rows"], cells, strict=True):
        assert {f"{100 * row['identified']:.0f}%", f"{row['psnr']:.1f}", f"{row['ssim']:.3f}"} <= set(shown.split())
    assert page.locator("figure svg.curve").count() == 2


def test_a_private_image_is_shown_as_it_is(visit: Open, audited: Path) -> None:
    """The first private image, read back pixel by pixel, is the first of the data set; it has the name of its class."""
    read = """
    async () => {
      const drawing = document.querySelector('svg.picture[aria-label="Private image 0, airplane"]');
      const held = document.querySelector(drawing.querySelector("use").getAttribute("href"));
      const image = Object.assign(new Image(), { src: held.getAttribute("href") });
      await image.decode();
      const canvas = document.createElement("canvas");
      canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
      const context = canvas.getContext("2d");
      context.drawImage(image, 0, 0);
      return [...context.getImageData(0, 0, canvas.width, canvas.height).data].filter((_, i) => i % 4 < 3);
    }
    """
    seen = visit(audited / "report.html")
    seen.pictures()
    shown = seen.page.evaluate(read)
    truth = load("cifar10-samples").batch([0]).inputs[0].permute(1, 2, 0) * 255
    assert shown == truth.round().int().flatten().tolist()
