"""The answer as a page with a plot, and as rows of a table."""

from __future__ import annotations

from pathlib import Path

from gradveil.lab.advise.answer import Recommendation, Trial, order_of, outcome_of, told
from gradveil.lab.advise.question import Question
from gradveil.metrics.table import NOT_AVAILABLE, PERCENT, styled
from gradveil.report.page import write_page
from gradveil.report.svg import Dot, scatter
from gradveil.report.words import in_sentence

COLUMNS = ("defense", "model", "recognised, at most", "accuracy", "points lost", "rounds", "lr", "outcome")


def rows(asked: Question, found: Recommendation) -> list[tuple[Trial, tuple[str, ...]]]:
    """The trials in the order of the table, each with its cells; of equal ones on one model, the most accurate."""
    shown: list[tuple[Trial, tuple[str, ...]]] = []
    for trial in sorted(found.trials, key=lambda one: order_of(found, one)):
        lost, how = found.lost(trial), "certified" if trial.certified else "measured"
        most = NOT_AVAILABLE if trial.most is None else f"{styled(trial.most, PERCENT)} ({how})"
        cells = (
            in_sentence(trial.defense), trial.model, most,
            NOT_AVAILABLE if trial.accuracy is None else f"{trial.accuracy:.1%}",
            NOT_AVAILABLE if lost is None else f"{lost:.1f}",
            str(trial.rounds), f"{trial.lr:.3g}", outcome_of(asked, found, trial),
        )  # fmt: skip
        shown.append((trial, cells))
    return shown


def render_advice(asked: Question, found: Recommendation, shortened: str, page: Path) -> Path:
    """Write the page, and return its path. Nothing in it is fetched."""
    table = rows(asked, found)
    numbers = {trial.number: place for place, (trial, _) in enumerate(table, start=1)}
    dots = []
    for trial, cells in table:
        lost = found.lost(trial)
        if trial.most is None:
            continue
        recommended = found.best is not None and found.best.number == trial.number
        dots.append(
            Dot(
                number=numbers[trial.number],
                words=f"{cells[0]} on {cells[1]}: {cells[2]} recognised, {cells[4]} points lost, {cells[7]}",
                kind="holds" if recommended else "leaks" if (trial.recognised or 0.0) >= 1.0 else "unknown",
                lost=None if lost is None else lost / 100,
                share=trial.most if trial.certified else trial.recognised or 0.0,
                interval=None if trial.certified else trial.interval,
            )
        )
    near = [(name, told(asked, found, one)) for name, one in nearest(found) if one is not None]
    return write_page(
        "advice.html", page, asked=asked, found=found, shortened=shortened, near=near,
        plot=scatter(dots), columns=COLUMNS, table=[cells for _, cells in table],
        front=[numbers[one.number] for one in found.front],
    )  # fmt: skip


def nearest(found: Recommendation) -> list[tuple[str, Trial | None]]:
    """Who comes near on each side, where nobody keeps both wishes."""
    if found.best is not None or not found.learned:
        return []
    return [
        ("Nearest that keeps what may be recognised", found.nearest_private),
        ("Nearest that keeps what may be lost", found.nearest_accurate),
    ]
