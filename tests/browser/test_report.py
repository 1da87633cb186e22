"""The report as a reader has it: opened in Chromium, at both widths, in both themes, by mouse and by keyboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from browser.visits import Open, Visit
from gradveil.report import render
from report.saved_audit import edit_audit, write_audit

pytestmark = pytest.mark.browser

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


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two defenses and one attack: what `gradveil audit` gives out of the box."""
    return render(write_audit(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def wide_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More images than fit, several attacks, and a spec too long for its column."""
    defenses = ["none", "noise:sigma=0.1", "clip:norm=1.0+prune:share=0.9+noise:sigma=0.001"]
    return render(write_audit(tmp_path_factory.mktemp("wide"), defenses=defenses, attacks=["ig", "dlg"], images=20))


def column(visit: Visit, number: int) -> list[str]:
    cells = visit.page.locator(f"table.results tbody tr > :nth-child({number})")
    return [text.split("\n")[0] for text in cells.all_inner_texts()]


def sorting(visit: Visit) -> dict[str, str]:
    """Which headings of the results claim to be sorted, and how."""
    heads = visit.page.locator("table.results thead th[aria-sort]")
    return {
        re.sub(r"\W*\(.*|\W+$", "", head.inner_text()): head.get_attribute("aria-sort") or "" for head in heads.all()
    }


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
    assert seen.page.evaluate("[...document.images].length") == 16
    assert seen.page.evaluate("[...document.images].every((i) => i.complete && i.naturalWidth === 32)")
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
    assert seen.page.inner_text("#sort-status") == "Sorted by Attack, ascending"


def test_missing_values_stay_last(visit: Open, tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    rows = edit_audit(folder)["rows"]
    rows[1]["psnr"] = None
    edit_audit(folder, rows=rows)
    seen = visit(render(folder))
    for _ in range(2):
        seen.page.get_by_role("button", name=re.compile("PSNR")).click()
        assert column(seen, 4)[-1] == "n/a"


def test_what_has_the_focus_is_seen(visit: Open, report: Path) -> None:
    seen = visit(report)
    outline = "[getComputedStyle(document.activeElement).outlineStyle, document.activeElement.tagName]"
    reached = set()
    seen.page.keyboard.press("Tab")
    while (focused := seen.page.evaluate(outline))[1] != "BODY":
        assert focused[0] == "solid"
        reached.add(focused[1])
        seen.page.keyboard.press("Tab")
    assert reached == {"A", "DIV", "BUTTON", "PRE"}  # links, scrolling tables, headings that sort, the case


@pytest.mark.parametrize("theme", THEMES)
def test_all_text_is_legible(visit: Open, wide_report: Path, theme: str) -> None:
    colors = visit(wide_report, theme=theme).page.evaluate(COLORS)
    faint = [(text, round(contrast(a, b), 2)) for text, a, b in colors if contrast(a, b) < 4.5]
    assert len(colors) > 300
    assert faint == []
    light = luminance(colors[0][2]) > 0.5
    assert light == (theme == "light")


def test_has_landmarks_and_named_tables(visit: Open, report: Path) -> None:
    page = visit(report).page
    for role in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1  # type: ignore[arg-type]
    tables = page.locator("table")
    assert tables.count() == page.locator("table > caption").count() == 2
    for region in page.locator("[role=region]").all():
        assert page.locator(f"[id='{region.get_attribute('aria-labelledby')}']").inner_text()


def test_reads_without_scripts(visit: Open, report: Path) -> None:
    page = visit(report, javascript=False).page
    assert page.locator("table.results tbody tr").count() == 3
    assert page.locator("button").count() == 0


def test_prints_on_paper(visit: Open, wide_report: Path, tmp_path: Path) -> None:
    seen = visit(wide_report, width=720, theme="dark")
    seen.page.emulate_media(media="print", color_scheme="dark")
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 720
    overflow = "[...document.querySelectorAll('.scroll')].every((e) => e.scrollWidth <= e.clientWidth)"
    assert seen.page.evaluate(overflow)
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    seen.screenshot("print-720")
    seen.page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
