"""The verdict on each defense: its worst case, graded, beside chance, in words; five answers; and its cost.

What defenses cost is read off saved trainings, here as well. Nothing here loads torch before it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from gradveil.auditing.audit import Answer, CeilingAnswer, CertificateAnswer, Cost, Interval, Object, Row, Verdict
from gradveil.auditing.chance import above_chance, best_above, label_luck, member_luck
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.metrics.statistics import FALSE_ALARMS

GRADES = {
    "privacy": {"A": 0.1, "B": 0.25, "C": 0.5, "D": 0.75},
    "utility": {"A": 0.01, "B": 0.03, "C": 0.06, "D": 0.12},
}
"""Up to where each grade goes; above all of them is F. Privacy: the share identified beyond chance, at the upper end of
its interval. Utility: the accuracy lost."""
WORST = "F"
GOOD = ("A", "B")
"""Grades of a defense that held; a few images, none of them found, are not above chance either, but earn neither."""
UNTRIED = "C"
"""The best grade of a defense that nobody has attacked by name, or with candidates, or in all that it sends."""
NO_COUNTER_MOVE, NO_CANDIDATES = "no counter-move", "no candidates"
"""Flags of a verdict: they are about all rows of a defense."""
STATISTICS = "running statistics not attacked"
"""A flag of rows: what no attack has looked at names examples."""
_MAY_DIFFER = {"defense", "tap", "threat", "evaluate_every", "checkpoint_every", "side_by_side"}
"""Settings in which a training may differ from the undefended one and still be compared with it."""


class Ceilings(NamedTuple):
    """What is proved of a defense."""

    seen: CeilingAnswer
    """For what the adversary of the audit saw."""
    of_run: CeilingAnswer | None = None
    """For a whole training, where it is known how long that is."""
    certificate: CertificateAnswer | None = None


def verdicts(
    rows: Sequence[Row],
    costs: Mapping[str, Cost] | None = None,
    ceilings: Mapping[str, Ceilings] | None = None,
    *,
    people: bool = False,
) -> tuple[Verdict, ...]:
    """One verdict per defense: its worst case over the attacks and rounds, the answers, its ceiling and its cost.

    ``people`` says that labels are people: what they give away then comes first in the sentence, and the grade is the
    worse of both.
    """
    attacks = [row for row in rows if not row.is_prior]
    found = []
    for defense in dict.fromkeys(row.defense for row in attacks):
        own = [row for row in attacks if row.defense == defense]
        above = above_chance(own, rows)
        worst = max(own, key=_leakage)
        alone = worst.prior_among(rows)
        ceiling, of_run, certificate = (ceilings or {}).get(defense, Ceilings(_NO_CEILING))
        if _passed(ceiling, own) or (ceiling.constant and True in above):
            ceiling, of_run, certificate = Ceilings(_PASSED)
        flags = [*worst.flags, *_untried(own, ceiling)]
        interval = _reaching(worst, own, lambda row: row.identified_interval)
        labels, member = _labels(own), _members(own)
        grade = privacy_grade(interval, worst.at_random, ceiling.recognised, flags)
        if people:  # a label says who it is, as a picture does
            named = privacy_grade(labels.interval, labels.chance, None, flags)
            grade = max((each for each in (grade, named) if each is not None), default=None)
        leaks = True if True in above else above[own.index(worst)]
        told = member.above_chance or (people and labels.above_chance)  # who took part, or who it is
        verdict = Verdict(
            defense=defense,
            grade=grade,
            attack=worst.attack,
            identified=worst.identified,
            identified_interval=interval,
            prior_only_identified=None if alone is None else alone.identified,
            chance=_chance(worst, rows),
            above_chance=leaks,
            outcome="leaks" if leaks or told else "holds" if leaks is False and grade in GOOD else "unknown",
            threat=worst.threat,
            adversary=worst.adversary,
            images=worst.images,
            gallery=worst.gallery,
            at_random=worst.at_random,
            candidates=worst.candidates,
            ranked_first=worst.ranked_first,
            round=worst.round,
            rebuilt=_picked(without_candidates(own), own, above, rows, rebuilds=True),
            recognised=_picked([row for row in own if _chooses(row)], own, above, rows, rebuilds=False),
            member=member,
            labels=labels,
            ceiling=ceiling,
            ceiling_of_run=of_run,
            certificate=certificate,
            flags=tuple(dict.fromkeys(flags)),
            sentence=_sentence(worst, alone, labels if people else None, tried=NO_CANDIDATES not in flags),
            cost=(costs or {}).get(defense),
        )
        found.append(verdict)
    return tuple(found)


_NO_CEILING = CeilingAnswer(
    why="it is not known what this defense does",
    sentence="There is no ceiling: it is not known what this defense does.",
)


_PASSED = CeilingAnswer(
    why="an attack passed the one that was proved, so that the proof does not fit what clients do",
    sentence="There is no ceiling: an attack passed the one that was proved, so that the proof does not fit what "
    "clients do.",
)


def _passed(ceiling: CeilingAnswer, own: Sequence[Row]) -> bool:
    """Whether attacks found more than the ceiling allows, surely: then it is none, whatever was proved."""
    for row in own:
        picked, member = row.identified_interval, None if row.member is None else row.member.interval
        for found, most in ((picked, ceiling.recognised), (member, ceiling.member)):
            if found is not None and most is not None and found[0] > most:
                return True
    return False


def _untried(own: Sequence[Row], ceiling: CeilingAnswer) -> list[str]:
    """What was not tried on a defense: an attack written for each of its links, and one with candidates.

    A ceiling that earns a good grade stands for an attack: no other can pass it. So does a reply that is the same
    whatever the examples are.
    """
    chance, most = ceiling.chance or 0.0, ceiling.recognised
    proved = ceiling.constant or (most is not None and _beyond(most, chance) <= GRADES["privacy"]["B"])
    scored = [row for row in own if row.identified is not None]
    moves = [row.counter_moves for row in scored if row.counter_moves is not None]
    countered = own[0].defense == "none" or any(each and None not in each.values() for each in moves)
    flags = [] if countered or proved else [NO_COUNTER_MOVE]
    return flags if any(_chooses(row) for row in scored) else [*flags, NO_CANDIDATES]


def _chance(row: Row, rows: Sequence[Row]) -> float | None:
    """What the same search identifies without the update, but at least what picking at random does."""
    alone = row.prior_among(rows)
    if alone is None or alone.identified is None or row.at_random is None:
        return None
    return max(alone.identified, row.at_random)


def _picked(
    asked: Sequence[Row], own: Sequence[Row], above: Sequence[bool | None], rows: Sequence[Row], *, rebuilds: bool
) -> Answer:
    """How many examples were picked out of the line-up, by pictures or by choice."""
    worst = worst_of(asked)
    if worst is None or worst.identified is None:
        why = "no attack that rebuilds was scored" if rebuilds else "no attack held a list of candidates"
        return _unanswered(why)
    done = "picked out by what" if rebuilds else "recognised by"
    tail = "rebuilt without candidates" if rebuilds else f"in a list that holds {'it' if worst.images == 1 else 'them'}"
    count, name = round(worst.identified * worst.images), worst.attack.partition(":")[0]
    chance = _chance(worst, rows)
    return Answer(
        attack=worst.attack,
        share=worst.identified,
        interval=_reaching(worst, asked, lambda row: row.identified_interval),
        chance=worst.at_random if chance is None else chance,
        above_chance=above[own.index(worst)],
        sentence=f"{count} of {worst.images} private images {'was' if count == 1 else 'were'} {done} {name} {tail}.",
    )


def _members(own: Sequence[Row]) -> Answer:
    """How many members a test finds that takes one in a hundred others for members."""
    asked = [(row, row.member) for row in own if row.member is not None and row.member.found is not None]
    if not asked:
        return _unanswered("no attack was asked about examples that took no part")
    best, found = max(asked, key=lambda pair: (pair[1].found or 0.0, pair[1].advantage or 0.0))
    name, few = best.attack.partition(":")[0], found.others * FALSE_ALARMS < 1
    counted = f"{found.found or 0:.0%} of {found.members} members were found by {name}"
    alarms = "without a false alarm" if few else "at 1% false alarms"
    ahead = "" if found.advantage is None else f"; true alarms are {found.advantage:.0%} more frequent than false ones"
    return Answer(
        attack=best.attack,
        share=found.found,
        interval=_reaching(best, own, lambda row: None if row.member is None else row.member.interval),
        chance=FALSE_ALARMS,
        above_chance=best_above([row for row, _ in asked], member_luck, best),
        sentence=f"{counted} {alarms} among {found.others} others{ahead}.",
    )


def _labels(own: Sequence[Row]) -> Answer:
    """How many labels attacks read off the update. A label that comes with a candidate is read off the list."""
    if any("labels" in row.threat.partition("+")[2].split("+") for row in own):
        return _unanswered("the adversary was given the labels")
    asked = [row for row in own if row.label_accuracy is not None and not _chooses(row) and row.candidates is None]
    if not asked:
        return _unanswered("no attack that reads labels off the update was scored")
    best = max(asked, key=lambda row: row.label_accuracy or 0.0)
    beside = "" if best.label_chance is None else f"; a guess without it gets {best.label_chance:.0%}"
    name = best.attack.partition(":")[0]
    return Answer(
        attack=best.attack,
        share=best.label_accuracy,
        interval=_reaching(best, asked, lambda row: row.label_interval),
        chance=best.label_chance,
        above_chance=best_above(asked, label_luck, best),
        sentence=f"{best.label_accuracy or 0:.0%} of the labels were read off the update by {name}{beside}.",
    )


def _unanswered(why: str) -> Answer:
    return Answer(why=why, sentence=f"Not known: {why}.")


def worst_of(rows: Sequence[Row]) -> Row | None:
    """The row that leaks most, among equals the one of the higher PSNR; None where none was scored."""
    return max((row for row in rows if row.identified is not None), key=_leakage, default=None)


def _reaching(best: Row, rows: Sequence[Row], interval: Callable[[Row], Interval | None]) -> Interval | None:
    """The interval of the best row, up to where those of rows with other numbers of examples end.

    Of equally many, the best ends highest. But saved rounds differ, and two examples, none found, exclude little.
    """
    own, others = interval(best), [interval(row) for row in rows if row.images != best.images]
    return None if own is None else (own[0], max(own[1], *(end[1] for end in others if end), 0.0))


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


def privacy_grade(
    interval: Interval | None, at_random: float | None, ceiling: float | None = None, flags: Sequence[str] = ()
) -> str | None:
    """From A to F by the most that can happen, less what picking at random would get; None if not measured.

    That is the upper end of the interval, which is what the images tried cannot exclude: a good grade takes many of
    them; or the ceiling, where that is lower. In a line-up no longer than a batch every pick is right, and nothing is
    measured. What nobody tried, by ``flags``, earns no good grade.
    """
    if interval is None or at_random is None or at_random >= 1:
        return None
    most = interval[1] if ceiling is None else min(interval[1], ceiling)
    earned = grade(_beyond(most, at_random), "privacy")
    return UNTRIED if earned in GOOD and {NO_COUNTER_MOVE, NO_CANDIDATES, STATISTICS} & set(flags) else earned


def _beyond(share: float, chance: float) -> float:
    return (share - chance) / (1 - chance) if chance < 1 else 1.0


def grade(value: float, of: Literal["privacy", "utility"]) -> str:
    return next((letter for letter, bound in GRADES[of].items() if value <= bound), WORST)


def _sentence(row: Row, alone: Row | None, people: Answer | None, *, tried: bool) -> str:
    """``people`` is the answer about labels where they say who somebody is; ``tried``: whether candidates were."""
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
    untried = "" if tried else " No attack held a list of candidates."
    if people is not None and people.share is not None:
        guess = "" if people.chance is None else f", and {people.chance:.0%} by a guess without the update"
        said = f"{guard}, {people.share:.0%} of the people were named by their label{guess}. {said}"
    return f"{said}.{more}{untried}"


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
