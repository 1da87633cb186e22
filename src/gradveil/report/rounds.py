"""Leakage over training: how the scores of saved exchanges change from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gradveil.report import words
from gradveil.report.charts import chart_by_round
from gradveil.report.measures import MEASURES, Measure, styled
from gradveil.report.records import Row

SHOWN = ("identified", "psnr", "lpips", "ssim")


@dataclass(frozen=True)
class Course:
    """One line of the charts: an attack on the exchanges of one training, in the order of rounds."""

    name: str
    change: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class OverTraining:
    """What the section shows."""

    courses: tuple[Course, ...]
    charts: tuple[tuple[str, Markup], ...]
    chance: bool
    """Whether the charts have a line for chance."""


def over_training(rows: Sequence[Row]) -> OverTraining | None:
    """The section, or None where no attack was scored in two rounds."""
    scored = [row for row in rows if row.round_number is not None and row.scores["identified"] is not None]
    courses = _courses(scored)
    if all(len(course.rows) < 2 for course in courses):
        return None
    priors = [row for row in rows if row.is_prior]
    shown = [measure for key in SHOWN for measure in MEASURES if measure.key == key]
    measured = [m for m in shown if any(row.scores[m.key] is not None for row in scored)]
    charts = tuple((f"{measure.name} by round", _chart(courses, priors, measure)) for measure in measured)
    return OverTraining(courses, charts, chance=bool(priors))


def _courses(rows: Sequence[Row]) -> tuple[Course, ...]:
    """One for each attack and training; trainings are told apart by their defense where that does it."""
    alike: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.attack, row.training), []).append(row)
    trainings = dict.fromkeys((row.training, row.defense) for row in rows)
    distinct = len({defense for _, defense in trainings}) == len(trainings)
    found = []
    for (attack, training), members in alike.items():
        ordered = tuple(sorted(members, key=lambda row: row.round_number or 0))
        of = words.in_sentence(ordered[0].defense) if distinct else str(training)
        found.append(Course(attack if len(trainings) == 1 else f"{attack}, {of}", _change(ordered), ordered))
    return tuple(found)


def _change(rows: Sequence[Row]) -> str:
    """From the first round to the last, in words."""
    first, last = rows[0], rows[-1]
    parts = [
        f"{measure.name} {styled(first.scores[measure.key], measure.style)} → "
        f"{styled(last.scores[measure.key], measure.style)}"
        for measure in MEASURES
        if measure.key in SHOWN and first.scores[measure.key] is not None
    ]
    return f"round {first.round_number} → {last.round_number}: {', '.join(parts)}"


def _chart(courses: Sequence[Course], priors: Sequence[Row], measure: Measure) -> Markup:
    lines = [
        [(float(row.round_number or 0), value) for row in course.rows if (value := row.scores[measure.key]) is not None]
        for course in courses
    ]
    levels = [level for row in priors if (level := row.scores[measure.key]) is not None]
    return chart_by_round(lines, measure.name, share=measure.style == "percent", levels=levels)
