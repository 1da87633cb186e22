"""Small plots as inline SVG. Colors come from the page's style sheet through classes, so they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from markupsafe import Markup, escape

from gradveil.report.records import Trace, Verdict

Scale = Callable[[float], float]

MOST_POINTS = 40
LOG_RATIO = 30
WIDTH, HEIGHT = 260, 130
LEFT, RIGHT, TOP, BOTTOM = 42, 8, 8, 22


def share_bar(verdict: Verdict) -> Markup:
    """A scale from 0 to 100% with the interval as a bar, the share as a mark on it, and chance as a dashed line.

    It is hidden from screen readers: the card says the same in words.
    """
    marks = ['<line class="track" x2="100%" y1="14" y2="14"/>']
    if verdict.interval is not None:
        low, high = (_along(share) for share in verdict.interval)
        marks.append(f'<line class="interval" x1="{low}" x2="{high}" y1="14" y2="14"/>')
    if verdict.chance is not None:
        x = _along(verdict.chance)
        marks.append(f'<line class="chance" x1="{x}" x2="{x}" y1="2" y2="26"/>')
    if verdict.identified is not None:
        marks.append(f'<circle class="share" cx="{_along(verdict.identified)}" cy="14" r="5"/>')
    return Markup(f'<svg class="bar" aria-hidden="true">{"".join(marks)}</svg>')


def _along(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.1f}%"


def objective_curve(trace: Trace, title: str) -> Markup | None:
    """One thin line per update and a bold one for the median, or None where there is nothing to draw.

    The scale is logarithmic where the values span more than a factor of 30 and are all above zero.
    """
    steps, lines = _thinned(trace)
    values = [v for line in lines for v in line if v is not None]
    if len(steps) < 2 or not values:
        return None
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > LOG_RATIO
    across = _scale(steps[0], steps[-1], LEFT, WIDTH - RIGHT)
    down = _scale(low, high, HEIGHT - BOTTOM, TOP, logarithmic=logarithmic)
    middle = [
        median(present) if (present := [v for v in column if v is not None]) else None
        for column in zip(*lines, strict=True)
    ]
    paths = [_path(steps, line, across, down, "one") for line in lines] if len(lines) > 1 else []
    paths.append(_path(steps, middle, across, down, "median"))
    words = f"{title}: {_fall(middle)} over {steps[-1]:g} steps{', logarithmic scale' if logarithmic else ''}"
    return Markup(
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">'
        f"{_axes(steps[-1], low, high, logarithmic)}{''.join(paths)}</svg>"
    )


def _thinned(trace: Trace) -> tuple[list[float], list[list[float | None]]]:
    """At most MOST_POINTS points of every line, evenly chosen, the first and the last among them."""
    count = len(trace.steps)
    kept = sorted({round(i * (count - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)}) if count else []
    lines = [[line[k] if k < len(line) else None for k in kept] for line in trace.lines]
    return [trace.steps[k] for k in kept], lines


def _scale(low: float, high: float, start: float, end: float, *, logarithmic: bool = False) -> Scale:
    """Data to pixels, linear or logarithmic; a flat range lies in the middle."""
    place: Scale = math.log if logarithmic else float
    span = place(high) - place(low)
    return lambda value: start + (end - start) * ((place(value) - place(low)) / span if span else 0.5)


def _path(steps: Sequence[float], line: Sequence[float | None], across: Scale, down: Scale, kind: str) -> str:
    """A line that breaks where the objective had no value."""
    commands, pen = [], "M"
    for step, value in zip(steps, line, strict=True):
        if value is None:
            pen = "M"
            continue
        commands.append(f"{pen}{across(step):.1f} {down(value):.1f}")
        pen = "L"
    return f'<path class="{kind}" d="{"".join(commands)}"/>'


def _axes(last_step: float, low: float, high: float, logarithmic: bool) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    note = f'<text x="{LEFT}" y="{HEIGHT - 6}">log scale</text>' if logarithmic else ""
    return (
        f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        f'<text x="{LEFT - 5}" y="{TOP + 8}" text-anchor="end">{high:.2g}</text>'
        f'<text x="{LEFT - 5}" y="{bottom}" text-anchor="end">{low:.2g}</text>'
        f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{last_step:g} steps</text>{note}'
    )


def _fall(middle: Sequence[float | None]) -> str:
    known = [v for v in middle if v is not None]
    return f"the median objective goes from {known[0]:.2g} to {known[-1]:.2g}"
