"""The report as a reader has it: opened in Chromium, at both widths, in both themes, by mouse and by keyboard."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser.visits import Open
from gradveil.report import render
from report.saved_audit import edit_audit, write_audit, write_full_audit

pytestmark = [pytest.mark.browser, pytest.mark.integration]

WIDTHS = (1280, 400)
THEMES = ("light", "dark")
HOSTILE = "</script><script>alert(1)</script><img src=http://127.0.0.1:9/x onerror=alert(2)>"

# Every element that shows text of its own, with its color and the first opaque background behind it.
COLORS = """
() => {
  const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const shown = [...document.body.querySelectorAll("*")].filter((element) =>
    element.checkVisibility() && !["SCRIPT", "STYLE"].includes(element.tagName) &&
    [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim()));
  return shown.map((element) => {
    const style = getComputedStyle(element);
    const front = element instanceof SVGElement ? style.fill : style.color;
    return [element.textContent.trim().slice(0, 40), rgb(front).slice(0, 3), behind(element)];
  });
}
"""


def luminance(color: list[float]) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [c / 255 for c in color]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(front: list[float], back: list[float]) -> float:
    low, high = sorted((luminance(front), luminance(back)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_opens_clean_and_fits(visit: Open, report: Path, width: int, theme: str) -> None:
    seen = visit(report, width=width, theme=theme)
    assert seen.pictures() == [[32, 32]] * 20
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    assert (seen.requests, seen.complaints) == ([], [])
    seen.screenshot(f"report-{width}-{theme}")


@pytest.mark.parametrize("width", WIDTHS)
def test_wide_tables_scroll_inside_themselves(visit: Open, wide_report: Path, width: int) -> None:
    seen = visit(wide_report, width=width)
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    overflowing = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
    assert seen.page.evaluate(overflowing) >= 5
    assert (seen.requests, seen.complaints) == ([], [])
    seen.screenshot(f"wide-{width}-light")


def test_wide_tables_scroll_by_keyboard(visit: Open, wide_report: Path) -> None:
    region = visit(wide_report, width=400).page.locator(".scroll").first
    region.focus()
    region.press("ArrowRight")
    scrolled = 0
    for _ in range(100):  # the page's policy forbids wait_for_function, which evaluates a string in the page
        scrolled = region.evaluate("(element) => element.scrollLeft")
        if scrolled > 0:
            break
        region.page.wait_for_timeout(100)
    assert scrolled > 0


def test_the_watch_sees_what_leaves(visit: Open, report: Path, tmp_path: Path) -> None:
    """A page that does fetch is caught: once by the watch, and without it by the page's own policy."""
    fetching = report.read_text().replace("</main>", '<img src="http://127.0.0.1:9/a.png" alt=""></main>')
    (tmp_path / "policed.html").write_text(fetching)
    assert "Content Security Policy" in " ".join(visit(tmp_path / "policed.html").complaints)
    (tmp_path / "open.html").write_text(re.sub(r"<meta http-equiv[^>]*>", "", fetching))
    assert visit(tmp_path / "open.html").requests == ["http://127.0.0.1:9/a.png"]


def test_hostile_text_does_nothing(visit: Open, tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    text = json.dumps(HOSTILE)[1:-1]
    raw = json.dumps(edit_audit(folder)).replace("cifar10-samples", text).replace("The adversary", text)
    edit_audit(folder, **json.loads(raw))
    seen = visit(render(folder))
    assert "<img src=http" in seen.page.inner_text("h1")
    assert (seen.requests, seen.complaints) == ([], [])


def test_the_plot_of_privacy_and_utility_fits(visit: Open, tmp_path: Path) -> None:
    page = render(write_full_audit(tmp_path))
    for width in WIDTHS:
        seen = visit(page, width=width)
        frame = seen.page.locator("svg.scatter").bounding_box()
        assert frame is not None
        for text in seen.page.locator("svg.scatter text").all():
            box = text.bounding_box()
            assert box is not None
            assert frame["x"] - 1 <= box["x"] <= box["x"] + box["width"] <= frame["x"] + frame["width"] + 1
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width
        seen.screenshot(f"full-{width}")


def test_what_has_the_focus_is_seen(visit: Open, report: Path) -> None:
    seen = visit(report)
    outline = "[getComputedStyle(document.activeElement).outlineStyle, document.activeElement.tagName]"
    reached = set()
    seen.page.keyboard.press("Tab")
    while (focused := seen.page.evaluate(outline))[1] != "BODY":
        assert focused[0] == "solid"
        reached.add(focused[1])
        seen.page.keyboard.press("Tab")
    assert reached == {"A", "DIV", "SELECT", "BUTTON", "PRE"}  # links, scrolling tables, filters, headings, the case


@pytest.mark.parametrize("theme", THEMES)
def test_all_text_is_legible(visit: Open, wide_report: Path, theme: str) -> None:
    colors = visit(wide_report, theme=theme).page.evaluate(COLORS)
    faint = [(text, round(contrast(a, b), 2)) for text, a, b in colors if contrast(a, b) < 4.5]
    assert len(colors) > 300
    assert faint == []
    light = luminance(colors[0][2]) > 0.5
    assert light == (theme == "light")


def test_a_picture_looks_the_same_wherever_it_is_shown(visit: Open, wide_report: Path) -> None:
    """It is held once and drawn again elsewhere, each pixel of it as a square of three."""
    page = visit(wide_report).page
    held = page.locator("image#picture-1")
    address = held.get_attribute("href") or ""
    exact = np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).convert("RGB"))
    shown = [page.locator("svg.picture", has=held), *page.locator("svg.picture:has(use[href='#picture-1'])").all()]
    assert len(shown) == 6, "the truth in each table"
    for one in shown:
        seen = np.asarray(Image.open(io.BytesIO(one.screenshot())).convert("RGB"))
        assert np.array_equal(seen[1:96:3, 1:96:3], exact), "in the middle of each square"


def test_long_titles_of_tables_are_seen_whole(visit: Open, tmp_path: Path) -> None:
    """A title is as wide as its table, which scrolls: on a narrow page it wraps before the edge."""
    page = visit(render(write_full_audit(tmp_path)), width=400).page
    for caption in page.locator("table.pictures caption").all():
        box = caption.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 400


def test_has_landmarks_and_named_tables(visit: Open, report: Path) -> None:
    page = visit(report).page
    for role in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1  # type: ignore[arg-type]
    tables = page.locator("table")
    assert tables.count() == page.locator("table > caption").count() == 3
    for region in page.locator("[role=region]").all():
        assert page.locator(f"[id='{region.get_attribute('aria-labelledby')}']").inner_text()


def test_reads_without_scripts(visit: Open, report: Path) -> None:
    page = visit(report, javascript=False).page
    assert page.locator("table.results tbody tr").count() == 3
    assert page.locator("button").count() == 0


def test_prints_on_paper(visit: Open, wide_report: Path) -> None:
    seen = visit(wide_report, width=720, theme="dark")
    seen.page.emulate_media(media="print", color_scheme="dark")
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 720
    overflow = "[...document.querySelectorAll('.scroll')].every((e) => e.scrollWidth <= e.clientWidth)"
    assert seen.page.evaluate(overflow)
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    seen.screenshot("print-720")
    assert not seen.page.locator(".filters").is_visible()


def test_paper_has_every_picture(visit: Open, wide_report: Path) -> None:
    """Also those that were never in view, and so not decoded."""
    seen = visit(wide_report, width=720)
    distinct = seen.page.locator("img, image").count()
    paper = seen.page.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Subtype\s*/Image", paper)) >= distinct > 100
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.page.evaluate("[...document.images].every((image) => image.loading === 'eager')")
