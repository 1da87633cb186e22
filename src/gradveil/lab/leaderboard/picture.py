"""The frontier as a picture: accuracy against the worst that was found out, one panel for each setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, PANEL, PLOT = 860, 250, (60, 470)
"""Of the picture, how tall a panel is, and between which pixels its plot lies; names stand right of it."""
TOP, BOTTOM, STEP = 34, 40, 12
BESIDE = 0.6
"""Names of points left of this stand beside them; those at the right edge are many, and stand in a list."""
_STYLE = """<style>
text { font: 11px sans-serif; fill: #24292f } .title { font-weight: bold; font-size: 13px }
.grid { stroke: #8c959f; stroke-opacity: .35 } .link { stroke: #8c959f; stroke-opacity: .6; fill: none }
.dot { fill: #cf222e } .plain { fill: #6e7781 } .proven { fill: #1a7f37 } .bar { stroke: #6e7781 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .dot { fill: #ff7b72 } .plain { fill: #8b949e }
.proven { fill: #3fb950 } .bar { stroke: #8b949e } }
</style>"""


@dataclass(frozen=True)
class Point:
    """One defense."""

    name: str
    worst: float
    accuracy: float
    spread: float

    @property
    def kind(self) -> str:
        if self.name == "none":
            return "plain"
        return "proven" if self.name.startswith(("dp", "veil")) else "dot"


@dataclass(frozen=True)
class Panel:
    """One setting."""

    title: str
    points: tuple[Point, ...]


def frontier(panels: Sequence[Panel]) -> str:
    """The picture as SVG, readable on light and on dark pages. Defenses with a proof are green, no defense is grey."""
    tall = PANEL * max(1, len(panels))
    parts = [_panel(panel, PANEL * place) for place, panel in enumerate(panels)]
    words = "Accuracy against the worst answer for each defense"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" role="img" aria-label="{words}">\n'
        f"{_STYLE}\n{''.join(parts)}</svg>\n"
    )


def _panel(panel: Panel, offset: int) -> str:
    left, right = PLOT
    top, bottom = offset + TOP, offset + PANEL - BOTTOM
    low = math.floor(10 * min(point.accuracy - point.spread for point in panel.points)) / 10
    most = max(point.accuracy + point.spread for point in panel.points)
    high = low + 0.2 * max(1, math.ceil((most - low) / 0.2))  # four steps of whole percents

    def x(share: float) -> float:
        return left + (right - left) * share

    def y(accuracy: float) -> float:
        return bottom - (bottom - top) * (accuracy - low) / (high - low)

    out = [f'<text class="title" x="{left}" y="{offset + 18}">{escape(panel.title)}</text>\n']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        out.append(f'<path class="grid" d="M{x(share):.1f} {top}V{bottom}"/>')
        out.append(f'<text x="{x(share):.1f}" y="{bottom + 15}" text-anchor="middle">{share:.0%}</text>\n')
    for number in range(5):
        accuracy = low + (high - low) * number / 4
        out.append(f'<path class="grid" d="M{left} {y(accuracy):.1f}H{right}"/>')
        out.append(f'<text x="{left - 6}" y="{y(accuracy) + 4:.1f}" text-anchor="end">{accuracy:.0%}</text>\n')
    middle = (left + right) / 2
    out.append(f'<text x="{middle}" y="{bottom + 30}" text-anchor="middle">worst answer, beyond chance</text>\n')
    out.append(
        f'<text transform="translate(14 {(top + bottom) / 2}) rotate(-90)" text-anchor="middle">accuracy</text>\n'
    )
    ordered = sorted(panel.points, key=lambda point: (-point.accuracy, point.worst, point.name))
    for crowd in ([one for one in ordered if one.worst < BESIDE], [one for one in ordered if one.worst >= BESIDE]):
        lines = _apart([y(point.accuracy) for point in crowd], top, bottom + 24)
        for point, line in zip(crowd, lines, strict=True):
            across, down, spread = x(point.worst), y(point.accuracy), point.spread
            beside = across + 12 if point.worst < BESIDE else right + 14
            ends = y(point.accuracy - spread), y(point.accuracy + spread)
            out.append(f'<path class="link" d="M{across + 5:.1f} {down:.1f}L{beside:.1f} {line:.1f}"/>')
            out.append(f'<path class="bar" d="M{across:.1f} {ends[0]:.1f}V{ends[1]:.1f}"/>')
            out.append(f'<circle class="{point.kind}" cx="{across:.1f}" cy="{down:.1f}" r="4"/>')
            told = f"{escape(point.name)}: {point.worst:.0%}, {point.accuracy:.0%}"
            out.append(f'<text x="{beside + 4:.1f}" y="{line + 4:.1f}">{told}</text>\n')
    return "".join(out)


def _apart(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Places of lines of text, from the top down, near where they are wanted and a step apart."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + STEP if places else top))
    over = (places[-1] if places else 0) - bottom
    for index in range(len(places) - 1, -1, -1):
        most = bottom if index == len(places) - 1 else places[index + 1] - STEP
        places[index] = min(places[index], most) if over > 0 else places[index]
    return places
