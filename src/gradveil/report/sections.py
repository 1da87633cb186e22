"""Sections with plots: leakage over training, privacy against utility, and the curves of trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from markupsafe import Markup
from pydantic import BaseModel, JsonValue

from gradveil.auditing.audit import Flag, Row, Verdict, read_model
from gradveil.metrics.table import METRICS, PERCENT, Number, styled
from gradveil.report.svg import Dot, chart_by_round, scatter
from gradveil.report.words import in_sentence, points, span

BY_ROUND = ("identified", "psnr", "lpips", "ssim")
"""Metrics with a chart over training."""


@dataclass(frozen=True)
class OverTraining:
    """How the scores of saved exchanges change from round to round."""

    courses: tuple[tuple[str, str], ...]
    """For each line of the charts, an attack on one training, its name and how it went from first to last."""
    charts: tuple[tuple[str, Markup], ...]
    chance: bool
    """Whether the charts have a line for chance."""


def over_training(rows: Sequence[Row]) -> OverTraining | None:
    """The section, or None where no attack was scored in two rounds. Trainings go by their defense if that does it."""
    alike: dict[tuple[str, str | None], list[tuple[int, Row]]] = {}
    for row in rows:
        if row.round is not None and row.identified is not None:
            alike.setdefault((row.attack, row.training), []).append((row.round, row))
    if all(len(members) < 2 for members in alike.values()):
        return None
    scored = [row for members in alike.values() for _, row in members]
    priors = [row for row in rows if row.is_prior]
    trainings = dict.fromkeys((row.training, row.defense) for row in scored)
    distinct = len({defense for _, defense in trainings}) == len(trainings)
    courses, lines = [], []
    for (attack, training), members in alike.items():
        members.sort(key=lambda member: member[0])
        (first, before), (last, after) = members[0], members[-1]
        of = in_sentence(before.defense) if distinct else str(training)
        changes = ", ".join(
            f"{metric.heading} {metric.format(start)} → {metric.format(getattr(after, name))}"
            for name, metric in METRICS.items()
            if name in BY_ROUND and (start := getattr(before, name)) is not None
        )
        name = attack if len(trainings) == 1 else f"{attack}, {of}"
        courses.append((name, f"round {first} → {last}: {changes}"))
        lines.append(members)
    charts = []
    for metric in (METRICS[name] for name in BY_ROUND):
        found = [
            [(float(number), value) for number, row in line if (value := getattr(row, metric.name)) is not None]
            for line in lines
        ]
        levels = [level for row in priors if (level := getattr(row, metric.name)) is not None]
        if any(found):
            drawn = chart_by_round(found, metric.heading, share=metric.style == PERCENT, levels=levels)
            charts.append((f"{metric.heading} by round", drawn))
    return OverTraining(tuple(courses), tuple(charts), chance=bool(priors))


@dataclass(frozen=True)
class Mark:
    """One defense of the plot, by its number there; what it costs is None where no training says it."""

    number: int
    verdict: Verdict
    lost: float | None
    accuracy: float | None

    @property
    def cost(self) -> str:
        if self.lost is None:
            return "not measured"
        return "the baseline" if self.verdict.defense == "none" else points(self.lost)

    def dot(self) -> Dot:
        verdict = self.verdict
        rebuilt = None if verdict.rebuilt_apart is None else verdict.rebuilt_apart.share
        seen = f"{styled(verdict.identified, PERCENT)} identified, 95% interval {span(verdict.identified_interval)}"
        if verdict.rebuilt_apart is not None:
            seen += f"; without candidates {styled(rebuilt, PERCENT)}"
        return Dot(
            number=self.number,
            words=f"{in_sentence(verdict.defense)}: {seen}; accuracy lost: {self.cost}",
            kind=verdict.outcome,
            lost=self.lost,
            share=verdict.identified or 0.0,
            interval=verdict.identified_interval,
            rebuilt=rebuilt,
        )


@dataclass(frozen=True)
class Tradeoff:
    """Every defense by the accuracy it costs and by what it lets through; no plot where no training was given."""

    plot: Markup | None
    marks: tuple[Mark, ...]
    untrained: str
    """The defenses whose cost is not known, as they are called in a sentence."""
    unscored: str
    """Those whose leakage is not known."""

    @property
    def rebuilt(self) -> bool:
        """Whether some worst case is one with a list of candidates, and what is rebuilt without one is told beside."""
        return any(mark.verdict.rebuilt_apart is not None for mark in self.marks)


def tradeoff(verdicts: Sequence[Verdict]) -> Tradeoff:
    """Each defense by its worst case and its cost; going without one costs nothing wherever a cost is known."""
    costs = [verdict.cost for verdict in verdicts if verdict.cost is not None]
    sums = ((cost.accuracy, cost.accuracy_lost) for cost in costs)
    plain = next((left + lost for left, lost in sums if left is not None and lost is not None), None)
    marks = []
    for number, verdict in enumerate((one for one in verdicts if one.identified is not None), start=1):
        lost, accuracy = (verdict.cost.accuracy_lost, verdict.cost.accuracy) if verdict.cost else (None, None)
        if verdict.defense == "none" and plain is not None:
            lost, accuracy = 0.0, plain
        marks.append(Mark(number, verdict, lost, accuracy))
    return Tradeoff(
        plot=scatter([mark.dot() for mark in marks]) if any(mark.lost is not None for mark in marks) else None,
        marks=tuple(marks),
        untrained=", ".join(in_sentence(mark.verdict.defense) for mark in marks if mark.lost is None),
        unscored=", ".join(in_sentence(verdict.defense) for verdict in verdicts if verdict.identified is None),
    )


class _Round(BaseModel):
    """A row of ``train.json``."""

    round: Number = None
    seconds: Number = None
    accuracy: Number = None
    loss: Number = None
    bytes_up: Number = None
    dropped: list[JsonValue] | None = None
    log: dict[str, Number] | None = None


class _TrainingFile(BaseModel):
    """What ``train.json`` holds of what the page shows."""

    case: dict[str, JsonValue] | None = None
    complete: Flag = False
    rows: list[_Round] | None = None


class TrainingCurves:
    """What a page shows of one training, out of ``folder/train.json``."""

    def __init__(self, folder: Path) -> None:
        found = read_model(folder / "train.json", _TrainingFile, "a training")
        rows = found.rows or []
        numbers = [row.round or place for place, row in enumerate(rows, start=1)]
        past = accumulate(row.seconds or 0.0 for row in rows)
        timed = list(zip(rows, numbers, past, strict=True))
        self.name = folder.name or str(folder)
        self.case = {key: _shown(value) for key, value in (found.case or {}).items()}
        self.complete, self.rounds = found.complete, len(rows)
        # (round, value) wherever it was evaluated, and accuracy over seconds.
        self.accuracy = [(number, row.accuracy) for row, number, _ in timed if row.accuracy is not None]
        self.loss = [(number, row.loss) for row, number, _ in timed if row.loss is not None]
        self.over_time = [(seconds, row.accuracy) for row, _, seconds in timed if row.accuracy is not None]
        self.seconds = timed[-1][2] if timed else 0.0
        self.megabytes_up = sum(row.bytes_up or 0.0 for row in rows) / 1e6
        self.dropped = sum(len(row.dropped or []) for row in rows)
        self.log = {key: value for key, value in ((rows and rows[-1].log) or {}).items() if value is not None}
        self.best = max((value for _, value in self.accuracy), default=None)
        self.last = self.accuracy[-1][1] if self.accuracy else None


def _shown(value: JsonValue) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
