"""The plot of privacy against utility as inline SVG: for each defense a dot with its interval, and a label to read.

Dots stand where they belong, also on top of each other; those that do share one label. Where the worst case is that of
an adversary with a list of candidates, a diamond says what was rebuilt without one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from gradveil.report.words import runs

WIDTH, HEIGHT = 460, 380
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 44
ASIDE = 66
"""Width of the column for defenses without a training."""
INSET = 22
"""Between the frame and the outermost dots: room for a label."""
LEAST_SPAN = 0.05
"""So much accuracy lies on the axis at least, lest small differences look large."""
STEPS, MOST_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5), 6
RADIUS, REACH, NEAR = 5, 7, 8
"""Of a dot, of a diamond, and how close two are that share a label, in pixels."""
LINE, LETTER = 14, 6.6
"""Height of a label, and width of a letter in it."""

Place = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class Dot:
    """One defense: the share of accuracy lost (None: not known), the share of images identified and its interval."""

    number: int
    words: str
    kind: str
    lost: float | None
    share: float
    interval: tuple[float, float] | None
    rebuilt: float | None = None
    """The share identified without candidates, where that is another."""


def scatter(dots: Sequence[Dot]) -> Markup:
    """The plot. Each dot says in a title what it is; the page has a table of the same beside it."""
    known = [_within(dot.lost, -1.0, 1.0) for dot in dots if dot.lost is not None]
    low = min(0.0, *known)
    high = max(*known, low + LEAST_SPAN)
    aside = ASIDE if len(known) < len(dots) else 0
    right = WIDTH - RIGHT - aside

    def across(lost: float | None) -> float:
        if lost is None:
            return WIDTH - RIGHT - ASIDE / 2
        share = (_within(lost, low, high) - low) / (high - low)
        return LEFT + INSET + share * (right - LEFT - 2 * INSET)

    places = [(across(dot.lost), _down(dot.share)) for dot in dots]
    drawn = [_drawn(dot, place) for dot, place in _paired(dots, places)]
    diamonds = {dot.number: (x, _down(dot.rebuilt)) for dot, (x, _) in _paired(dots, places) if dot.rebuilt is not None}
    ticks = "".join(_tick(across(value), value) for value in _ticks(low, high))
    words = f"Share of images identified against accuracy lost, for {len(dots)} defenses; the table has the numbers"
    return Markup(
        f'<svg class="scatter" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">'
        f"{_frame(right, aside)}{ticks}{''.join(drawn)}{_labels(dots, places, diamonds, right)}</svg>"
    )


def _paired(dots: Sequence[Dot], places: Sequence[Place]) -> Iterator[tuple[Dot, Place]]:
    return zip(dots, places, strict=True)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _down(share: float) -> float:
    return HEIGHT - BOTTOM - INSET - _within(share, 0.0, 1.0) * (HEIGHT - TOP - BOTTOM - 2 * INSET)


def _ticks(low: float, high: float) -> list[float]:
    """Whole steps between the ends, as fine as there is room for."""
    step = next((step for step in STEPS if (high - low) / step <= MOST_TICKS), STEPS[-1])
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _frame(right: float, aside: float) -> str:
    """Both axes with their names, lines across, and the column for what was not trained."""
    bottom, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    shares = "".join(
        f'<path class="grid" d="M{LEFT} {_down(share):.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{_down(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    column = (
        f'<path class="axis" d="M{right} {TOP}V{bottom}"/>'
        f'<text x="{right + aside / 2:.1f}" y="{bottom + 16}" text-anchor="middle">not trained</text>'
    )
    return (
        f'{shares}<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>{column if aside else ""}'
        f'<text class="title" x="{(LEFT + right) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
        "points of accuracy lost →</text>"
        f'<text class="title" transform="translate(11 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        "images identified →</text>"
    )


def _tick(x: float, value: float) -> str:
    bottom = HEIGHT - BOTTOM
    return (
        f'<path class="axis" d="M{x:.1f} {bottom}v4"/>'
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{round(100 * value)}</text>'
    )


def _drawn(dot: Dot, place: Place) -> str:
    x, y = place
    low, high = (dot.share, dot.share) if dot.interval is None else dot.interval
    known = "" if dot.lost is not None else " untrained"
    diamond = "" if dot.rebuilt is None else _diamond(x, _down(dot.rebuilt))
    return (
        f'<g class="dot {dot.kind}{known}"><title>{escape(dot.words)}</title>'
        f'<path d="M{x:.1f} {_down(low):.1f}V{_down(high):.1f}"/>'
        f'{diamond}<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"/></g>'
    )


def _diamond(x: float, y: float) -> str:
    """Larger than a dot, so that both are seen in one place."""
    far = REACH
    return f'<path class="rebuilt" d="M{x - far:.1f} {y:.1f}l{far}-{far} {far} {far}-{far} {far}z"/>'


def _labels(dots: Sequence[Dot], places: Sequence[Place], diamonds: Mapping[int, Place], right: float) -> str:
    """A label for each place, where it covers neither a dot nor an interval nor another label."""
    shared: dict[Place, set[int]] = {}
    for number, (x, y) in [*((dot.number, place) for dot, place in _paired(dots, places)), *diamonds.items()]:
        near = (at for at in shared if abs(at[0] - x) <= NEAR and abs(at[1] - y) <= NEAR)
        shared.setdefault(next(near, (x, y)), set()).add(number)
    marks = [(place, RADIUS) for place in places] + [(place, REACH) for place in diamonds.values()]
    taken = [(x - far, y - far, x + far, y + far) for (x, y), far in marks]
    taken += [
        (x - 2, _down(dot.interval[1]), x + 2, _down(dot.interval[0]))
        for dot, (x, _) in _paired(dots, places)
        if dot.interval is not None
    ]
    drawn = []
    for place, numbers in shared.items():
        text = runs(sorted(numbers), "–")
        box = _free(place, LETTER * len(text), taken, WIDTH if place[0] > right else right)
        taken.append(box)
        drawn.append(f'<text class="label" x="{box[0]:.1f}" y="{box[3] - 3:.1f}">{escape(text)}</text>')
    return "".join(drawn)


def _free(place: Place, wide: float, taken: Sequence[Box], right: float) -> Box:
    """The first free box near a place: beside the dot, else above or below it; beside it where none is free."""
    x, y = place
    right_of, left_of, middle = x + RADIUS + 3, x - RADIUS - 3 - wide, x - wide / 2
    beside, above, below = y - LINE / 2, y - RADIUS - 3 - LINE, y + RADIUS + 3
    tried = [(right_of, beside), (left_of, beside), (middle, above), (middle, below)]
    tried += [(left, top) for top in (above, below) for left in (right_of, left_of)]
    boxes = [(left, top, left + wide, top + LINE) for left, top in tried]
    inside = [b for b in boxes if b[0] >= LEFT and b[2] <= right and b[1] >= 0 and b[3] <= HEIGHT - BOTTOM]
    return next((box for box in inside if not any(_cover(box, other) for other in taken)), (inside or boxes)[0])


def _cover(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
