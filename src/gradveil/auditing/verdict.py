"""The verdict on each defense: its worst case, graded, beside chance, in words, with its cost where that was measured.

What defenses cost is read off saved trainings, and verdicts are written as a JUnit file, here as well. Nothing here
loads torch before it is needed: whoever reads an audit of version 1 has to judge it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal
from xml.etree import ElementTree

from gradveil.auditing.audit import Answer, Audit, Cost, Object, Row, Verdict
from gradveil.core.atomic import write_atomically
from gradveil.core.errors import BadFileError, GradveilError

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
_MAY_DIFFER = {"defense", "tap", "threat", "evaluate_every", "checkpoint_every", "side_by_side"}
"""Settings in which a training may differ from the undefended one and still be compared with it."""
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
"""Characters that no XML file may hold, but the name of a defense in a stranger's file might."""


def verdicts(rows: Sequence[Row], costs: Mapping[str, Cost] | None = None) -> tuple[Verdict, ...]:
    """One verdict per defense: its worst case over the attacks and rounds, beside chance and beside its cost."""
    attacks = [row for row in rows if not row.is_prior]
    found = []
    for defense in dict.fromkeys(row.defense for row in attacks):
        own = [row for row in attacks if row.defense == defense]
        worst = max(own, key=_leakage)
        rebuilt, alone = worst_of(without_candidates(own)), worst.prior_among(rows)
        verdict = Verdict(
            defense=defense,
            grade=privacy_grade(worst.identified_interval, worst.at_random),
            attack=worst.attack,
            identified=worst.identified,
            identified_interval=worst.identified_interval,
            prior_only_identified=None if alone is None else alone.identified,
            threat=worst.threat,
            adversary=worst.adversary,
            images=worst.images,
            gallery=worst.gallery,
            at_random=worst.at_random,
            candidates=worst.candidates,
            ranked_first=worst.ranked_first,
            round=worst.round,
            rebuilt=None if rebuilt is None else _answer(rebuilt, rows),
            flags=worst.flags,
            sentence=_sentence(worst, alone),
            cost=(costs or {}).get(defense),
        )
        found.append(judged(verdict))
    return tuple(found)


def _answer(row: Row, rows: Sequence[Row]) -> Answer:
    alone, share, interval = row.prior_among(rows), row.identified, row.identified_interval
    chance, above = _beside_chance(
        share, interval, None if alone is None else alone.identified, row.at_random, row.images
    )
    return Answer(attack=row.attack, share=share, interval=interval, chance=chance, above_chance=above)


def worst_of(rows: Sequence[Row]) -> Row | None:
    """The row that leaks most, among equals the one of the higher PSNR; None where none was scored."""
    return max((row for row in rows if row.identified is not None), key=_leakage, default=None)


def without_candidates(rows: Sequence[Row]) -> list[Row]:
    """The rows of attacks that hold no list to choose from, and so have to rebuild the private images."""
    return [row for row in rows if not _chooses(row)]


def needs_of(row: Row) -> frozenset[str]:
    """What the attack of a row needs to know or to be able to do."""
    if row.needs is not None:
        return frozenset(row.needs)
    from gradveil.attacks import ATTACKS, BUDGETS

    return frozenset(ATTACKS.build(row.attack, BUDGETS["quick"]).requires)


def _chooses(row: Row) -> bool:
    return "candidates" in needs_of(row)


def _leakage(row: Row) -> tuple[float, float]:
    """What was scored comes before what was not."""
    return (-1.0, 0.0) if row.identified is None else (row.identified, row.psnr or 0.0)


def judged(verdict: Verdict) -> Verdict:
    """The verdict beside chance: what chance is, whether it explains what was found, and whether the defense held.

    Not being above chance is good news only with the grade to go with it.
    """
    share, interval, alone = verdict.identified, verdict.identified_interval, verdict.prior_only_identified
    chance, above = _beside_chance(share, interval, alone, verdict.at_random, verdict.images or 0)
    outcome: Literal["leaks", "holds", "unknown"] = "unknown"
    if above:
        outcome = "leaks"
    elif above is False and verdict.grade in _GOOD:
        outcome = "holds"
    return verdict.model_copy(update={"chance": chance, "above_chance": above, "outcome": outcome})


def _beside_chance(
    share: float | None,
    interval: tuple[float, float] | None,
    alone: float | None,
    at_random: float | None,
    images: int,
) -> tuple[float | None, bool | None]:
    """What chance reaches, and whether this share is above it."""
    chance = None if alone is None or at_random is None else max(alone, at_random)
    if share is None or interval is None or chance is None:
        return chance, None
    return chance, interval[0] > chance and at_least(round(share * images), images, chance) < _SELDOM


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


@dataclass(frozen=True)
class _Trained:
    """A finished training."""

    folder: str
    defense: str
    settings: Object
    accuracy: float
    round_seconds: float


def costs(folders: Sequence[str], audited: Sequence[str] | None = None) -> dict[str, Cost]:
    """By defense, what it costs. Refuses trainings that cannot be compared or are of defenses not ``audited``."""
    runs = {run.defense: run for run in map(_read_run, folders)}
    if len(runs) < len(folders):
        raise GradveilError("two folders of --training are of the same defense: keep one of them")
    if runs and "none" not in runs:
        raise GradveilError("--training needs one without a defense to compare with: gradveil train --defense none")
    for run in runs.values():
        differing = [key for key, value in run.settings.items() if runs["none"].settings.get(key) != value]
        if differing:
            raise GradveilError(
                f"{run.folder} was trained with other settings than the training without a defense "
                f"({', '.join(differing)}): train both alike"
            )
        if audited is not None and run.defense not in (*audited, "none"):
            raise GradveilError(f"{run.folder} was trained under {run.defense}: add --defense {run.defense}")
    return {name: _cost(run, runs["none"]) for name, run in runs.items() if name != "none"}


def _read_run(folder: str) -> _Trained:
    from gradveil.defenses import DEFENSES
    from gradveil.federated import read_training

    found = read_training(Path(folder))
    if not found.get("complete"):
        raise GradveilError(f"the training in {folder} is not finished: gradveil train --out {folder} --resume")
    try:
        settings = {key: value for key, value in found["case"].items() if key not in _MAY_DIFFER}
        run = _Trained(
            folder=folder,
            defense=DEFENSES.canonical(str(found["case"]["defense"])),
            settings=settings,
            accuracy=float(found["rows"][-1]["accuracy"]),  # type: ignore[arg-type]  # None is refused below
            round_seconds=median(float(row["seconds"]) for row in found["rows"]),
        )
    except (LookupError, TypeError, ValueError):
        raise BadFileError(f"{folder}/train.json is not a training that this Gradveil reads") from None
    if not 0 <= run.accuracy <= 1 or not 0 < run.round_seconds < math.inf:
        raise BadFileError(f"{folder}/train.json is damaged: no training reaches such accuracy or takes such time")
    return run


def _cost(run: _Trained, plain: _Trained) -> Cost:
    lost, added = plain.accuracy - run.accuracy, run.round_seconds / plain.round_seconds - 1
    points, percent = round(100 * lost, 1), round(100 * added)
    accuracy = f"{abs(points):g} points of accuracy {'lost' if points >= 0 else 'gained'}"
    time = f"{abs(percent)}% {'more' if percent >= 0 else 'less'} time per round"
    return Cost(
        grade=grade(lost, "utility"),
        accuracy=run.accuracy,
        accuracy_lost=lost,
        round_seconds=run.round_seconds,
        time_added=added,
        sentence=f"In training, {accuracy} ({run.accuracy:.1%} instead of {plain.accuracy:.1%}) and {time}.",
    )


def write_junit(audit: Audit, path: Path, bound: float | None = None) -> None:
    """Write one test case per defense, which continuous integration shows beside its other tests.

    It fails above the bound on ``identified`` or, without one, on the worst grade. The text of a test is the verdict's
    sentence and its flags. What could not be measured is skipped.
    """
    found = audit.verdicts
    failed = [
        one.identified is not None and (one.grade == WORST if bound is None else one.identified > bound)
        for one in found
    ]  # fmt: skip
    suite = ElementTree.Element(
        "testsuite",
        name="gradveil audit",
        tests=str(len(found)),
        failures=str(sum(failed)),
        errors="0",
        skipped=str(sum(verdict.identified is None for verdict in found)),
    )
    for verdict, fails in zip(found, failed, strict=True):
        rows = [row for row in audit.rows if row.defense == verdict.defense and row.prior_of is None]
        name, seconds = _NOT_XML.sub("?", verdict.defense), sum(row.seconds or 0.0 for row in rows)
        test = ElementTree.SubElement(suite, "testcase", classname="gradveil.audit", name=name, time=f"{seconds:.3f}")
        flags = f" Flags: {', '.join(verdict.flags)}." if verdict.flags else ""
        text = _NOT_XML.sub("?", f"{verdict.sentence}{flags}")
        if fails:
            message = f"grade {verdict.grade}: {verdict.identified:.0%} identified"
            ElementTree.SubElement(test, "failure", type="leak", message=message).text = text
        elif verdict.identified is None:
            ElementTree.SubElement(test, "skipped", message=_NOT_XML.sub("?", verdict.sentence))
        else:
            ElementTree.SubElement(test, "system-out").text = _NOT_XML.sub("?", f"Grade {verdict.grade}. ") + text
    write_atomically(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))
