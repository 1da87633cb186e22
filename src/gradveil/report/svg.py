"""Plots as inline SVG. Colors come from the page's style sheet through classes, so they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup, escape

from gradveil.auditing.audit import Trace
from gradveil.report.answers import ShownAnswer
from gradveil.report.words import runs

STYLES = 6
"""How many lines the style sheet tells apart, by color and by dashes."""
MOST_POINTS = 40
LOG_RATIO = 30
"""A scale is logarithmic from this ratio of its ends on."""

Scale = Callable[[float], float]
"""Data to pixels."""
Line = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axes:
    """A plot's size, and between which pixels its axes run."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    def across(self, low: float, high: float, *, inset: int = 0, flat: float = 0.5, logarithmic: bool = False) -> Scale:
        """Linear or logarithmic; where all values are the same, they lie at ``flat``."""
        return _scale(low, high, self.left + inset, self.right - inset, flat, logarithmic)

    def down(self, low: float, high: float, *, inset: int = 0, flat: float = 0.5, logarithmic: bool = False) -> Scale:
        """The same, where higher values lie higher: the y axis of SVG points down."""
        return _scale(low, high, self.bottom - inset, self.top + inset, flat, logarithmic)

    def grid(self, values: Iterable[float], down: Scale, style: str, drop: float) -> str:
        """Lines across with their values beside them; ``drop`` puts the middle of a text on its line."""
        return "".join(
            f'<path class="grid" d="M{self.left} {down(value):.1f}H{self.right}"/>'
            f'<text x="{self.left - 6}" y="{down(value) + drop:.1f}" text-anchor="end">{value:{style}}</text>'
            for value in values
        )

    def drawn(self, kind: str, words: str, *parts: str) -> Markup:
        """The plot; ``words`` say what it shows to who cannot see it."""
        return Markup(
            f'<svg class="{kind}" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(words)}">'
            f"{''.join(parts)}</svg>"
        )


def _scale(low: float, high: float, start: float, end: float, flat: float, logarithmic: bool) -> Scale:
    place: Scale = math.log if logarithmic else float
    span = place(high) - place(low)
    return lambda value: start + (end - start) * ((place(value) - place(low)) / span if span else flat)


def _far_apart(low: float, high: float) -> bool:
    return low > 0 and high / low > LOG_RATIO


def share_bar(answer: ShownAnswer) -> Markup:
    """A scale from 0 to 100%: the interval as a bar, the share as a dot, chance as a dashed line, a ceiling as a tick.

    It is hidden from screen readers: the card says the same in words.
    """
    marks = ['<line class="track" x2="100%" y1="10" y2="10"/>']
    if answer.interval is not None:
        low, high = (f"{100 * share:.1f}%" for share in answer.interval)
        marks.append(f'<line class="interval" x1="{low}" x2="{high}" y1="10" y2="10"/>')
    if answer.chance is not None:
        x = f"{100 * answer.chance:.1f}%"
        marks.append(f'<line class="chance" x1="{x}" x2="{x}" y1="1" y2="19"/>')
    if answer.ceiling is not None:
        x = f"{100 * answer.ceiling:.1f}%"
        marks.append(f'<line class="ceiling" x1="{x}" x2="{x}" y1="0" y2="20"/>')
    if answer.share is not None:
        marks.append(f'<circle class="share" cx="{100 * answer.share:.1f}%" cy="10" r="5"/>')
    return Markup(f'<svg class="bar" aria-hidden="true">{"".join(marks)}</svg>')


CURVE = Axes(260, 130, left=42, right=252, top=8, bottom=108)


def objective_curve(trace: Trace, title: str) -> Markup | None:
    """One thin line per update and a bold one for the median, or None where there is nothing to draw.

    At most MOST_POINTS points of every line are drawn, evenly chosen, the first and the last among them. The scale is
    logarithmic where the values span more than a factor of 30 and are all above zero.
    """
    last = len(trace.steps) - 1
    kept = sorted({round(i * last / (MOST_POINTS - 1)) for i in range(MOST_POINTS)}) if trace.steps else []
    steps = [trace.steps[k] for k in kept]
    lines = [[line[k] if k < len(line) else None for k in kept] for line in trace.objective]
    values = [value for line in lines for value in line if value is not None]
    if len(steps) < 2 or not values:
        return None
    low, high = min(values), max(values)
    logarithmic = _far_apart(low, high)
    across, down = CURVE.across(steps[0], steps[-1]), CURVE.down(low, high, logarithmic=logarithmic)
    columns = ([value for value in column if value is not None] for column in zip(*lines, strict=True))
    middle = [median(present) if present else None for present in columns]

    def path(line: Sequence[float | None], kind: str) -> str:
        """A line that breaks where the objective had no value."""
        commands, pen = [], "M"
        for step, value in zip(steps, line, strict=True):
            if value is None:
                pen = "M"
                continue
            commands.append(f"{pen}{across(step):.1f} {down(value):.1f}")
            pen = "L"
        return f'<path class="{kind}" d="{"".join(commands)}"/>'

    known = [value for value in middle if value is not None]
    said = f"the median objective goes from {known[0]:.2g} to {known[-1]:.2g} over {steps[-1]:g} steps"
    left, below, note = CURVE.left, CURVE.height - 6, f'<text x="{CURVE.left}" y="{CURVE.height - 6}">log scale</text>'
    return CURVE.drawn(
        "curve",
        f"{title}: {said}{', logarithmic scale' if logarithmic else ''}",
        f'<path class="axis" d="M{left} {CURVE.top}V{CURVE.bottom}H{CURVE.right}"/>',
        f'<text x="{left - 5}" y="{CURVE.top + 8}" text-anchor="end">{high:.2g}</text>',
        f'<text x="{left - 5}" y="{CURVE.bottom}" text-anchor="end">{low:.2g}</text>',
        f'<text x="{CURVE.right}" y="{below}" text-anchor="end">{steps[-1]:g} steps</text>',
        note if logarithmic else "",
        *(path(line, "one") for line in lines if len(lines) > 1),
        path(middle, "median"),
    )


CHART = Axes(560, 300, left=48, right=548, top=12, bottom=266)
APART = 24
"""Pixels between two numbers on the axis below."""


def chart(lines: Sequence[Line], what: str, over: str, *, share: bool = False) -> Markup:
    """One line for each training, in the order of the table, from 0 to 100% or to the largest value."""
    right, top = _most(lines, share)
    across, down = CHART.across(0.0, right, flat=0.0), CHART.down(0.0, top, flat=0.0)
    return CHART.drawn(
        "chart",
        f"{what} over {over}, at the end {_ends(lines)}",
        _quarters(top, down, share),
        f'<text x="{CHART.right}" y="{CHART.height - 10}" text-anchor="end">{right:.3g} {escape(over)}</text>',
        *(_line(line, number, across, down) for number, line in enumerate(lines)),
    )


def chart_by_round(lines: Sequence[Line], what: str, *, share: bool = False, levels: Sequence[float] = ()) -> Markup:
    """One line with its points marked for each attack, over the rounds that were looked at; ``levels`` lie flat.

    Rounds stand on a logarithmic scale where the last is more than 30 times the first. As many of their numbers are
    written below as have room, the last one always.
    """
    right, top = _most([*lines, [(0.0, level) for level in levels]], share)
    rounds = sorted({x for line in lines for x, _ in line})
    across = CHART.across(rounds[0], right, inset=8, logarithmic=_far_apart(rounds[0], right))
    down = CHART.down(0.0, top, flat=0.0)
    numbers: list[float] = []
    for number in reversed(rounds):
        if not numbers or across(numbers[-1]) - across(number) >= APART:
            numbers.append(number)
    below = CHART.height - 16
    return CHART.drawn(
        "chart",
        f"{what} by round, from round {rounds[0]:g} to {right:g}, at the end {_ends(lines)}",
        _quarters(top, down, share),
        *(f'<text x="{across(one):.1f}" y="{below}" text-anchor="middle">{one:g}</text>' for one in numbers),
        *(f'<path class="level" d="M{CHART.left} {down(level):.1f}H{CHART.right}"/>' for level in levels),
        *(_line(line, number, across, down, marked=True) for number, line in enumerate(lines)),
    )


def _most(lines: Sequence[Line], share: bool) -> tuple[float, float]:
    """The largest of both axes."""
    points = [point for line in lines for point in line]
    top = 1.0 if share else max(0.0, max((y for _, y in points), default=1.0))
    return max((x for x, _ in points), default=1.0), top


def _ends(lines: Sequence[Line]) -> str:
    return "; ".join(f"line {n}: {line[-1][1]:.3g}" for n, line in enumerate(lines, start=1) if line)


def _quarters(top: float, down: Scale, share: bool) -> str:
    return CHART.grid([top * part / 4 for part in range(5)], down, ".0%" if share else ".2g", drop=3.5)


def _line(line: Line, number: int, across: Scale, down: Scale, *, marked: bool = False) -> str:
    """A line, with its points where they are to be seen; one point alone is always seen."""
    places = [(f"{across(x):.1f}", f"{down(y):.1f}") for x, y in line]
    kind = f"line line-{number % STYLES}"
    path = f'<path class="{kind}" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>' if len(places) > 1 else ""
    seen = places if marked or len(places) == 1 else []
    return path + "".join(f'<circle class="{kind}" cx="{x}" cy="{y}" r="3"/>' for x, y in seen)


SCATTER = Axes(460, 380, left=46, right=450, top=12, bottom=336)
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
    """Privacy against utility: for each defense a dot with its interval, and a label to read.

    Dots stand where they belong, also on top of each other; those that do share one label. Where the worst case is that
    of an adversary with a list of candidates, a diamond, larger than a dot, says what was rebuilt without one. Each dot
    says in a title what it is; the page has a table of the same beside it.
    """
    known = [min(max(dot.lost, -1.0), 1.0) for dot in dots if dot.lost is not None]
    low = min(0.0, *known)
    high = max(*known, low + LEAST_SPAN)
    aside = ASIDE if len(known) < len(dots) else 0
    right, bottom = SCATTER.right - aside, SCATTER.bottom
    across = _scale(low, high, SCATTER.left + INSET, right - INSET, 0.5, False)
    down = SCATTER.down(0.0, 1.0, inset=INSET)
    drawn, marks, diamonds, taken = [], [], [], []
    for dot in dots:
        x = SCATTER.right - ASIDE / 2 if dot.lost is None else across(min(max(dot.lost, low), high))
        ends = dot.interval or (dot.share, dot.share)
        diamond = ""
        marks.append((dot.number, (x, down(dot.share)), RADIUS))
        if dot.rebuilt is not None:
            y, far = down(dot.rebuilt), REACH
            diamonds.append((dot.number, (x, y), far))
            diamond = f'<path class="rebuilt" d="M{x - far:.1f} {y:.1f}l{far}-{far} {far} {far}-{far} {far}z"/>'
        if dot.interval is not None:
            taken.append((x - 2, down(dot.interval[1]), x + 2, down(dot.interval[0])))
        drawn.append(
            f'<g class="dot {dot.kind}{" untrained" if dot.lost is None else ""}"><title>{escape(dot.words)}</title>'
            f'<path d="M{x:.1f} {down(ends[0]):.1f}V{down(ends[1]):.1f}"/>'
            f'{diamond}<circle cx="{x:.1f}" cy="{down(dot.share):.1f}" r="{RADIUS}"/></g>'
        )
    step = next((step for step in STEPS if (high - low) / step <= MOST_TICKS), STEPS[-1])
    ticks = [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    column = (
        f'<path class="axis" d="M{right} {SCATTER.top}V{bottom}"/>'
        f'<text x="{right + aside / 2:.1f}" y="{bottom + 16}" text-anchor="middle">not trained</text>'
    )
    return SCATTER.drawn(
        "scatter",
        f"Share of images identified against accuracy lost, for {len(dots)} defenses; the table has the numbers",
        SCATTER.grid((0.0, 0.25, 0.5, 0.75, 1.0), down, ".0%", drop=4),
        f'<path class="axis" d="M{SCATTER.left} {SCATTER.top}V{bottom}H{SCATTER.right}"/>{column if aside else ""}'
        f'<text class="title" x="{(SCATTER.left + right) / 2:.1f}" y="{SCATTER.height - 8}" text-anchor="middle">'
        "points of accuracy lost →</text>"
        f'<text class="title" transform="translate(11 {(SCATTER.top + bottom) / 2:.1f}) rotate(-90)" '
        'text-anchor="middle">images identified →</text>',
        *(
            f'<path class="axis" d="M{across(value):.1f} {bottom}v4"/>'
            f'<text x="{across(value):.1f}" y="{bottom + 16}" text-anchor="middle">{round(100 * value)}</text>'
            for value in ticks
        ),
        *drawn,
        _labels([*marks, *diamonds], taken, right),
    )


def _labels(marks: Sequence[tuple[int, Place, int]], taken: Sequence[Box], right: float) -> str:
    """A label for each place, where it covers neither a mark, of a number and a reach, nor an interval nor a label."""
    shared: dict[Place, set[int]] = {}
    for number, (x, y), _ in marks:
        near = (at for at in shared if abs(at[0] - x) <= NEAR and abs(at[1] - y) <= NEAR)
        shared.setdefault(next(near, (x, y)), set()).add(number)
    boxes = [*((x - far, y - far, x + far, y + far) for _, (x, y), far in marks), *taken]
    drawn = []
    for place, numbers in shared.items():
        text = runs(sorted(numbers), "–")
        box = _free(place, LETTER * len(text), boxes, SCATTER.width if place[0] > right else right)
        boxes.append(box)
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
    inside = [b for b in boxes if b[0] >= SCATTER.left and b[2] <= right and b[1] >= 0 and b[3] <= SCATTER.bottom]

    def covers(one: Box, other: Box) -> bool:
        return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]

    return next((box for box in inside if not any(covers(box, other) for other in taken)), (inside or boxes)[0])
