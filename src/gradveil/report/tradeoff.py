"""Privacy against utility: every defense by the accuracy it costs and by what it lets through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gradveil.report.measures import span, styled
from gradveil.report.records import Verdict
from gradveil.report.scatter import Dot, scatter
from gradveil.report.words import in_sentence, outcome, points


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


@dataclass(frozen=True)
class Tradeoff:
    """What the section shows; there is no plot where no training was given."""

    plot: Markup | None
    marks: tuple[Mark, ...]
    untrained: str
    """The defenses whose cost is not known, as they are called in a sentence."""
    unscored: str
    """Those whose leakage is not known."""

    @property
    def rebuilt(self) -> bool:
        """Whether some worst case is one with a list of candidates, and what is rebuilt without one is told beside."""
        return any(mark.verdict.rebuilt is not None for mark in self.marks)


def tradeoff(verdicts: Sequence[Verdict]) -> Tradeoff:
    """Each defense by its worst case and its cost; going without one costs nothing wherever a cost is known."""
    scored = [verdict for verdict in verdicts if verdict.identified is not None]
    plain = next((cost for verdict in verdicts if (cost := _plain_accuracy(verdict)) is not None), None)
    marks = tuple(_mark(number, verdict, plain) for number, verdict in enumerate(scored, start=1))
    return Tradeoff(
        plot=scatter([_dot(mark) for mark in marks]) if any(mark.lost is not None for mark in marks) else None,
        marks=marks,
        untrained=_names(mark.verdict for mark in marks if mark.lost is None),
        unscored=_names(verdict for verdict in verdicts if verdict.identified is None),
    )


def _plain_accuracy(verdict: Verdict) -> float | None:
    """The accuracy without a defense, which every cost is told beside."""
    cost = verdict.cost
    return (
        None
        if cost is None or cost.accuracy is None or cost.accuracy_lost is None
        else cost.accuracy + cost.accuracy_lost
    )


def _mark(number: int, verdict: Verdict, plain: float | None) -> Mark:
    if verdict.defense == "none" and plain is not None:
        return Mark(number, verdict, 0.0, plain)
    cost = verdict.cost
    return (
        Mark(number, verdict, None, None) if cost is None else Mark(number, verdict, cost.accuracy_lost, cost.accuracy)
    )


def _dot(mark: Mark) -> Dot:
    verdict = mark.verdict
    seen = f"{styled(verdict.identified, 'percent')} identified, 95% interval {span(verdict.interval)}"
    if verdict.rebuilt is not None:
        seen += f"; without candidates {styled(verdict.rebuilt.identified, 'percent')}"
    return Dot(
        number=mark.number,
        words=f"{in_sentence(verdict.defense)}: {seen}; accuracy lost: {mark.cost}",
        kind=outcome(verdict),
        lost=mark.lost,
        share=verdict.identified or 0.0,
        interval=verdict.interval,
        rebuilt=None if verdict.rebuilt is None else verdict.rebuilt.identified,
    )


def _names(verdicts: Iterable[Verdict]) -> str:
    return ", ".join(in_sentence(verdict.defense) for verdict in verdicts)
