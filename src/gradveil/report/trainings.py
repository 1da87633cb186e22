"""The curves of several federated trainings on one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape

from gradveil.core.atomic import write_atomically
from gradveil.core.errors import GradveilError
from gradveil.report.fields import Fields
from gradveil.report.folder import read_json
from gradveil.report.page import policy_hash, template_file, templates

RESULT = "train.json"
STYLES = 6
"""How many lines the style sheet tells apart, by color and by dashes."""
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 34


@dataclass(frozen=True)
class Training:
    """What a page shows of one training."""

    name: str
    case: dict[str, str]
    complete: bool
    rounds: int
    accuracy: tuple[tuple[float, float], ...]
    """(round, accuracy) wherever it was evaluated; likewise the loss, and accuracy over seconds."""
    loss: tuple[tuple[float, float], ...]
    over_time: tuple[tuple[float, float], ...]
    seconds: float
    megabytes_up: float
    dropped: int
    log: dict[str, float]

    @property
    def best(self) -> float | None:
        return max((value for _, value in self.accuracy), default=None)

    @property
    def last(self) -> float | None:
        return self.accuracy[-1][1] if self.accuracy else None


def render_trainings(folders: Sequence[Path], page: Path) -> Path:
    """Write one page with the curves of these trainings, and return its path. Nothing in it is fetched."""
    if not folders:
        raise GradveilError("nothing to compare: name folders, as in gradveil train --compare DIR DIR --out page.html")
    if page.is_dir():
        raise GradveilError(f"{page} is a folder; name the page to write, as in --out page.html")
    shown = [load_training(folder) for folder in folders]
    shared = {name: value for name, value in shown[0].case.items() if all(one.case.get(name) == value for one in shown)}
    differing = sorted({name for one in shown for name in one.case} - shared.keys())
    style = template_file("report.css") + template_file("trainings.css")
    html = templates().get_template("trainings.html").render(
        style=Markup(style),
        style_hash=policy_hash(style),
        trainings=shown,
        shared=shared,
        differing=differing,
        styles=STYLES,
        charts=[
            ("Accuracy by round", chart([one.accuracy for one in shown], "accuracy", "rounds", share=True)),
            ("Accuracy by time", chart([one.over_time for one in shown], "accuracy", "seconds", share=True)),
            ("Loss by round", chart([one.loss for one in shown], "loss", "rounds")),
        ],
    )  # fmt: skip
    write_atomically(page, html.encode(errors="replace"))
    return page


def load_training(folder: Path) -> Training:
    """Read ``folder/train.json``."""
    path = folder / RESULT
    top = Fields(read_json(path, "a training"), str(path))
    rows = top.objects("rows", "row")
    numbers = [row.number("round") or place for place, row in enumerate(rows, start=1)]
    each = [row.number("seconds") or 0.0 for row in rows]
    past = [sum(each[: place + 1]) for place in range(len(each))]
    accuracy, loss = ([row.number(key) for row in rows] for key in ("accuracy", "loss"))
    last = rows[-1].object("log") if rows else top.object("log")
    return Training(
        name=folder.name or str(folder),
        case={key: _shown(value) for key, value in top.object("case").raw.items()},
        complete=top.flag("complete"),
        rounds=len(rows),
        accuracy=_known(numbers, accuracy),
        loss=_known(numbers, loss),
        over_time=_known(past, accuracy),
        seconds=sum(each),
        megabytes_up=sum(row.number("bytes_up") or 0.0 for row in rows) / 1e6,
        dropped=sum(len(row.items("dropped")) for row in rows),
        log={key: value for key in last.raw if (value := last.number(key)) is not None},
    )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _known(places: Sequence[float], values: Sequence[float | None]) -> tuple[tuple[float, float], ...]:
    return tuple((place, value) for place, value in zip(places, values, strict=True) if value is not None)


def chart(lines: Sequence[Sequence[tuple[float, float]]], what: str, over: str, *, share: bool = False) -> Markup:
    """One line for each training, in the order of the table, from 0 to 100% or to the largest value."""
    points = [point for line in lines for point in line]
    right, top = max((x for x, _ in points), default=1.0), max((y for _, y in points), default=1.0)
    top = 1.0 if share else top
    across = _scale(right, LEFT, WIDTH - RIGHT)
    down = _scale(top, HEIGHT - BOTTOM, TOP)
    drawn = []
    for number, line in enumerate(lines):
        places = [f"{across(x):.1f} {down(y):.1f}" for x, y in line]
        kind = f"line line-{number % STYLES}"
        if len(places) == 1:
            x, y = places[0].split()
            drawn.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="3"/>')
        elif places:
            drawn.append(f'<path class="{kind}" d="M{"L".join(places)}"/>')
    ends = "; ".join(f"line {n}: {line[-1][1]:.3g}" for n, line in enumerate(lines, start=1) if line)
    grid = "".join(_tick(top * part / 4, down, share) for part in range(5))
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{what} over {over}, at the end {ends}")}">{grid}'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{right:.3g} {escape(over)}</text>'
        f"{''.join(drawn)}</svg>"
    )


def _scale(most: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value / most if most else 0.0)


def _tick(value: float, down: Callable[[float], float], share: bool) -> str:
    y, text = down(value), f"{value:.0%}" if share else f"{value:.2g}"
    return (
        f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
    )
