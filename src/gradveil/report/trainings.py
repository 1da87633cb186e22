"""The curves of several federated trainings on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from gradveil.core.atomic import write_atomically
from gradveil.core.errors import GradveilError
from gradveil.report.charts import STYLES, chart
from gradveil.report.fields import Fields
from gradveil.report.folder import read_json
from gradveil.report.page import policy_hash, template_file, templates

RESULT = "train.json"


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
    style = template_file("report.css") + template_file("charts.css")
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
