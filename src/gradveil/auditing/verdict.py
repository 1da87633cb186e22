"""The verdict on each defense: its worst case, graded, beside chance, in words, with its cost where that was measured.

Nothing here loads torch before it is needed: whoever reads an audit of version 1 has to judge it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from gradveil.auditing.audit import Cost, Leak, Row, Verdict

GRADES = {
    "privacy": {"A": 0.1, "B": 0.25, "C": 0.5, "D": 0.75},
    "utility": {"A": 0.01, "B": 0.03, "C": 0.06, "D": 0.12},
}
"""Up to where each grade goes; above all of them is F. Privacy: the share identified beyond chance, at the upper end of
its interval. Utility: the accuracy lost."""
WORST = "F"
_GOOD = ("A", "B")
"""Grades of a defense that held; a few images, none of them found, are not above chance either, but earn neither."""
_SELDOM = 0.025
"""Chance is ruled out where it finds as many in fewer than one of forty audits."""
_Leak = TypeVar("_Leak", bound=Leak)


def verdicts(rows: Sequence[Row], costs: Mapping[str, Cost] | None = None) -> tuple[Verdict, ...]:
    """One verdict per defense: its worst case over the attacks and rounds, beside chance and beside its cost."""
    attacks = [row for row in rows if not row.is_prior]
    found = []
    for defense in dict.fromkeys(row.defense for row in attacks):
        own = [row for row in attacks if row.defense == defense]
        worst = max(own, key=_leakage)
        # It would say the same twice where the worst of all rebuilds.
        rebuilt = worst_of(without_candidates(own)) if _chooses(worst) else None
        verdict = Verdict(
            defense=defense,
            grade=privacy_grade(worst.identified_interval, worst.at_random),
            **dict(_found(worst, rows)),
            threat=worst.threat,
            adversary=worst.adversary,
            images=worst.images,
            gallery=worst.gallery,
            at_random=worst.at_random,
            candidates=worst.candidates,
            ranked_first=worst.ranked_first,
            round=worst.round,
            rebuilt=None if rebuilt is None else _found(rebuilt, rows),
            flags=worst.flags,
            sentence=_sentence(worst, worst.prior_among(rows)),
            cost=(costs or {}).get(defense),
        )
        found.append(judged(verdict))
    return tuple(found)


def _found(row: Row, rows: Sequence[Row]) -> Leak:
    alone = row.prior_among(rows)
    return Leak(
        attack=row.attack,
        identified=row.identified,
        identified_interval=row.identified_interval,
        prior_only_identified=None if alone is None else alone.identified,
    )


def worst_of(rows: Sequence[Row]) -> Row | None:
    """The row that leaks most, among equals the one of the higher PSNR; None where none was scored."""
    return max((row for row in rows if row.identified is not None), key=_leakage, default=None)


def without_candidates(rows: Sequence[Row]) -> list[Row]:
    """The rows of attacks that hold no list to choose from, and so have to rebuild the private images."""
    return [row for row in rows if not _chooses(row)]


def _chooses(row: Row) -> bool:
    from gradveil.attacks import ATTACKS, BUDGETS
    from gradveil.threat import Knowledge

    return Knowledge.CANDIDATES in ATTACKS.build(row.attack, BUDGETS["quick"]).requires


def _leakage(row: Row) -> tuple[float, float]:
    """What was scored comes before what was not."""
    return (-1.0, 0.0) if row.identified is None else (row.identified, row.psnr or 0.0)


def judged(verdict: Verdict) -> Verdict:
    """The verdict beside chance: what chance is, whether it explains what was found, and whether the defense held.

    Not being above chance is good news only with the grade to go with it.
    """
    beside = _beside_chance(verdict, verdict)
    outcome: Literal["leaks", "holds", "unknown"] = "unknown"
    if beside.above_chance:
        outcome = "leaks"
    elif beside.above_chance is False and verdict.grade in _GOOD:
        outcome = "holds"
    rebuilt = None if verdict.rebuilt is None else _beside_chance(verdict.rebuilt, verdict)
    return beside.model_copy(update={"outcome": outcome, "rebuilt": rebuilt})


def _beside_chance(found: _Leak, verdict: Verdict) -> _Leak:
    alone, at_random, above = found.prior_only_identified, verdict.at_random, None
    chance = None if alone is None or at_random is None else max(alone, at_random)
    if found.identified is not None and found.identified_interval is not None and chance is not None:
        images = verdict.images or 0
        luck = at_least(round(found.identified * images), images, chance)
        above = found.identified_interval[0] > chance and luck < _SELDOM
    return found.model_copy(update={"chance": chance, "above_chance": above})


def at_least(count: int, trials: int, chance: float) -> float:
    """How likely so many of some trials succeed, or more.

    >>> round(at_least(1, 8, 0.01), 4), at_least(0, 8, 0.01)
    (0.0773, 1.0)
    """
    from scipy.special import betainc  # not scipy.stats, which takes a second to load

    return float(betainc(count, trials - count + 1, chance)) if count else 1.0


def privacy_grade(interval: tuple[float, float] | None, at_random: float | None) -> str | None:
    """From A to F by the upper end of the interval, less what picking at random would get; None if not measured.

    The upper end is what the images tried cannot exclude: a good grade takes many of them. In a line-up no longer than
    a batch every pick is right, and nothing is measured.
    """
    if interval is None or at_random is None or at_random >= 1:
        return None
    return grade((interval[1] - at_random) / (1 - at_random), "privacy")


def grade(value: float, of: Literal["privacy", "utility"]) -> str:
    return next((letter for letter, bound in GRADES[of].items() if value <= bound), WORST)


def _sentence(row: Row, alone: Row | None) -> str:
    guard = "Without a defense" if row.defense == "none" else f"Under {row.defense}"
    name = row.attack.partition(":")[0]  # its options stand beside the sentence
    if row.identified is None:
        return f"{guard}, nothing could be scored: there is no truth, only the objective of {name} itself."
    if row.round is not None:
        guard = f"In round {row.round} {guard[0].lower()}{guard[1:]}"
    # An attack that chooses among candidates rebuilds nothing: it ranks them, and its choice is then judged.
    done, share = f"picked out of {row.gallery} by what {name} rebuilt from the update", row.identified
    alike = None if alone is None else alone.identified
    if row.ranked_first is not None:
        done, share = f"ranked first among {row.candidates} candidates by {name}", row.ranked_first
        alike = None if alone is None else alone.ranked_first
    count, picked, total = round(share * row.images), round(row.identified * row.images), row.images
    whole = "the private image was" if total == 1 else f"all {total} private images were"
    some = f"{count} of {total} private images {'was' if count == 1 else 'were'}"
    who = {0: "no private image was", total: whole}.get(count, some)
    said = f"{guard}, {who} {done}"
    if alone is not None and alike is not None:
        said += f", and {round(alike * alone.images)} of {alone.images} without the update"
    more = "" if picked == count else f" The pictures it chose pick {picked} of {total} out of {row.gallery}."
    return f"{said}.{more}"
