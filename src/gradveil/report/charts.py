"""Charts of several lines as inline SVG: how something goes on over rounds or over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup, escape

STYLES = 6
"""How many lines the style sheet tells apart, by color and by dashes."""
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 34
LOG_RATIO = 30
APART = 24
"""Pixels between two numbers on the axis below."""

Line = Sequence[tuple[float, float]]
Scale = Callable[[float], float]


def chart(lines: Sequence[Line], what: str, over: str, *, share: bool = False) -> Markup:
    """One line for each training, in the order of the table, from 0 to 100% or to the largest value."""
    right, top = _most(lines, share)
    across, down = _scale(right, LEFT, WIDTH - RIGHT), _scale(top, HEIGHT - BOTTOM, TOP)
    drawn = [_drawn(line, number, across, down) for number, line in enumerate(lines)]
    end = f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{right:.3g} {escape(over)}</text>'
    return _svg(f"{what} over {over}, at the end {_ends(lines)}", _grid(top, down, share) + end + "".join(drawn))


def chart_by_round(lines: Sequence[Line], what: str, *, share: bool = False, levels: Sequence[float] = ()) -> Markup:
    """One line with its points marked for each attack, over the rounds that were looked at; ``levels`` lie flat.

    Rounds stand on a logarithmic scale where the last is more than 30 times the first.
    """
    right, top = _most([*lines, [(0.0, level) for level in levels]], share)
    rounds = sorted({x for line in lines for x, _ in line})
    across, down = _between(rounds[0], right, LEFT + 8, WIDTH - RIGHT - 8), _scale(top, HEIGHT - BOTTOM, TOP)
    flat = [f'<path class="level" d="M{LEFT} {down(level):.1f}H{WIDTH - RIGHT}"/>' for level in levels]
    drawn = [_drawn(line, number, across, down, marked=True) for number, line in enumerate(lines)]
    words = f"{what} by round, from round {rounds[0]:g} to {right:g}, at the end {_ends(lines)}"
    return _svg(words, _grid(top, down, share) + _numbers(rounds, across) + "".join(flat + drawn))


def _svg(words: str, content: str) -> Markup:
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">{content}</svg>'
    )


def _most(lines: Sequence[Line], share: bool) -> tuple[float, float]:
    """The largest of both axes."""
    points = [point for line in lines for point in line]
    top = 1.0 if share else max(0.0, max((y for _, y in points), default=1.0))
    return max((x for x, _ in points), default=1.0), top


def _ends(lines: Sequence[Line]) -> str:
    return "; ".join(f"line {n}: {line[-1][1]:.3g}" for n, line in enumerate(lines, start=1) if line)


def _drawn(line: Line, number: int, across: Scale, down: Scale, *, marked: bool = False) -> str:
    """A line, with its points where they are to be seen; one point alone is always seen."""
    places = [(f"{across(x):.1f}", f"{down(y):.1f}") for x, y in line]
    kind = f"line line-{number % STYLES}"
    path = f'<path class="{kind}" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>' if len(places) > 1 else ""
    seen = places if marked or len(places) == 1 else []
    return path + "".join(f'<circle class="{kind}" cx="{x}" cy="{y}" r="3"/>' for x, y in seen)


def _scale(most: float, start: float, end: float) -> Scale:
    return lambda value: start + (end - start) * (value / most if most else 0.0)


def _between(low: float, high: float, start: float, end: float) -> Scale:
    """From low to high; logarithmic where they are far apart, and a single value in the middle."""
    place: Scale = math.log if low > 0 and high / low > LOG_RATIO else float
    span = place(high) - place(low)
    return lambda value: start + (end - start) * ((place(value) - place(low)) / span if span else 0.5)


def _grid(top: float, down: Scale, share: bool) -> str:
    return "".join(_tick(top * part / 4, down, share) for part in range(5))


def _tick(value: float, down: Scale, share: bool) -> str:
    y, text = down(value), f"{value:.0%}" if share else f"{value:.2g}"
    return (
        f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
    )


def _numbers(rounds: Sequence[float], across: Scale) -> str:
    """The rounds along the axis below, as many as have room; the last one always."""
    kept: list[float] = []
    for number in reversed(rounds):
        if not kept or across(kept[-1]) - across(number) >= APART:
            kept.append(number)
    return "".join(
        f'<text x="{across(number):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{number:g}</text>' for number in kept
    )
