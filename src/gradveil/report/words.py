"""The report's plain language: the outcome, the adversary and the setting, in sentences for a reader without us."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from gradveil.report.fields import Fields, number_or_none
from gradveil.report.measures import MEASURES, NOT_AVAILABLE, styled
from gradveil.report.records import Rebuilt, Row, Verdict

THREATS = {
    "A": "eavesdropper",
    "B": "informed eavesdropper",
    "C": "parameter-aware eavesdropper",
    "D": "data-enhanced eavesdropper",
    "E": "statistics-informed eavesdropper",
    "F": "active manipulator",
    "G": "data-enhanced manipulator",
    "H": "active client manipulator",
}
GOOD = ("A", "B")
"""Grades of a defense that held; a few images, none of them found, are not above chance either, but earn neither."""
SELDOM = 0.025
"""Chance is ruled out where it finds as many in fewer than one of forty audits."""


def defense_name(spec: str) -> str:
    return "No defense" if spec == "none" else spec


def in_sentence(spec: str) -> str:
    """A defense as it is called inside a sentence."""
    return "no defense" if spec == "none" else spec


def attack_name(row: Row) -> str:
    if not row.is_prior:
        return row.attack
    return f"prior only ({row.prior_of})" if row.prior_of else "prior only"


def short_attack(spec: str) -> str:
    """An attack without its options.

    >>> short_attack("ig:iterations=600,restarts=1")
    'ig'
    """
    return spec.partition(":")[0]


def choice(row: Row) -> str:
    """What the pictures of a row are where its attack drew none; empty of all others."""
    return "" if row.candidates is None else f", its choice among {row.candidates} candidates"


def row_name(row: Row) -> str:
    """A row inside a sentence. The prior alone meets no defense: it is there without an update."""
    when = "" if row.stage is None else f", {row.stage}"
    return attack_name(row) if row.is_prior else f"{row.attack} against {in_sentence(row.defense)}{when}"


def threat_name(threat: str) -> str:
    """A threat model by letter and title, with what was granted on top of it.

    >>> threat_name("C+labels")
    'C, parameter-aware eavesdropper, given labels besides'
    """
    letter, *extra = threat.split("+")
    if letter not in THREATS:
        return threat
    granted = f", given {' and '.join(extra)} besides" if extra else ""
    return f"{letter}, {THREATS[letter]}{granted}"


def above_chance(verdict: Verdict) -> bool | None:
    """Whether even the low end of the interval lies above chance, which seldom finds as many; None: not known."""
    return _beyond_luck(verdict, verdict.images or 0)


def rebuilt_above_chance(verdict: Verdict) -> bool | None:
    """The same of attacks that hold no candidates; None also where none of them ran."""
    found = verdict.rebuilt or (verdict if verdict.ranked_first is None else None)
    return None if found is None else _beyond_luck(found, verdict.images or 0)


def outcome(verdict: Verdict) -> Literal["leaks", "holds", "unknown"]:
    """Red, green or neither. Not being above chance is good news only with the grade to go with it."""
    if above_chance(verdict):
        return "leaks"
    return "holds" if above_chance(verdict) is False and verdict.grade in GOOD else "unknown"


def _beyond_luck(found: Verdict | Rebuilt, images: int) -> bool | None:
    if found.identified is None or found.interval is None or found.chance is None:
        return None
    luck = at_least(round(found.identified * images), images, found.chance)
    return found.interval[0] > found.chance and luck < SELDOM


def at_least(count: int, trials: int, chance: float) -> float:
    """How likely so many of some trials succeed, or more.

    >>> round(at_least(1, 8, 0.01), 4), at_least(0, 8, 0.01)
    (0.0773, 1.0)
    """
    few = sum(math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(count))
    return max(0.0, 1.0 - few)


def headline(verdicts: Sequence[Verdict]) -> str:
    """The outcome of the whole audit in a few sentences."""
    judged = [(verdict, share) for verdict in verdicts if (share := verdict.identified) is not None]
    if not judged:
        return "No share of identified images was measured, so this audit has no verdict."
    worst, share = max(judged, key=lambda pair: pair[1])
    extreme = f"{styled(share, 'percent')} of private images were identified with {in_sentence(worst.defense)}"
    known = [above for verdict, _ in judged if (above := above_chance(verdict)) is not None]
    if not known:
        return f"At worst, {extreme}; chance was not measured, so there is nothing to compare this with."
    if len(judged) == 1:
        chance = f"{'' if known[0] else 'not '}more often than chance explains"
        return f"With the attacks tried, {extreme}: {chance}.{_beside(worst.rebuilt)}"
    count = "each" if all(known) else str(sum(known)) if any(known) else "none"
    return (
        f"In {count} of the {len(known)} settings tried, private images were identified more often than chance "
        f"explains. {_without_candidates(verdicts)}{_spread(judged, share, extreme)}."
    )


def _beside(rebuilt: Rebuilt | None) -> str:
    return "" if rebuilt is None else f" Without a list of candidates it was {styled(rebuilt.identified, 'percent')}."


def _without_candidates(verdicts: Sequence[Verdict]) -> str:
    """In how many settings that took no list to choose from; empty where no attack had one."""
    known = [above for verdict in verdicts if (above := rebuilt_above_chance(verdict)) is not None]
    if not known or not any(verdict.rebuilt for verdict in verdicts):
        return ""
    return f"Pictures rebuilt without a list of candidates were enough for that in {sum(known)} of {len(known)}. "


def _spread(judged: Sequence[tuple[Verdict, float]], most: float, extreme: str) -> str:
    """The most images that were identified in a setting, beside the fewest."""
    least = min(share for _, share in judged)
    if least == most:
        return f"It was {styled(most, 'percent')} in every setting"
    first, *others = [in_sentence(verdict.defense) for verdict, share in judged if share == least]
    more = f" and {len(others)} more" if others else ""
    return f"At worst, {extreme}; at best, {styled(least, 'percent')} with {first}{more}"


def grades(bounds: Mapping[str, float], unit: str) -> str:
    """Up to where each grade goes.

    >>> grades({"A": 0.1, "B": 0.25}, "%")
    'A up to 10%, B up to 25%, F above'
    """
    return ", ".join([*(f"{letter} up to {100 * bound:g}{unit}" for letter, bound in bounds.items()), "F above"])


def points(share: float | None) -> str:
    """A share of accuracy in points.

    >>> points(0.0312), points(-0.01), points(None)
    ('3.1 points', 'none (1.0 points gained)', 'n/a')
    """
    if share is None:
        return NOT_AVAILABLE
    return f"{100 * share:.1f} points" if share >= 0 else f"none ({-100 * share:.1f} points gained)"


def setting(case: Fields, trainings: Sequence[Fields] = (), line_ups: Collection[int] = ()) -> list[str]:
    """What was attacked and how hard, in sentences; ``line_ups``: how many images stood in those that were held."""
    given = case.raw.get("restarts") is not None
    restarts = f" and {_count(case, 'restarts', 'restart')} for each update" if given else ""
    sentences = [
        *(_saved(trainings) if trainings else _made(case)),
        f"The adversary searches with the budget “{value_of(case, 'budget')}”{restarts}{_unless_said(case)}.",
        "It keeps the result that its own objective prefers: it never sees the truth.",
    ]
    if line_ups:
        sizes = f"{min(line_ups)} to {max(line_ups)}" if len(set(line_ups)) > 1 else f"{min(line_ups)}"
        sentences.append(f"An image is identified in a line-up of {sizes} images.")
    return sentences


def _unless_said(case: Fields) -> str:
    """The options of an attack come before the budget."""
    said = any(f"{effort}=" in str(spec) for spec in case.items("attacks") for effort in ("iterations", "restarts"))
    return ", where the options of an attack do not say otherwise" if said else ""


def _made(case: Fields) -> list[str]:
    """Where the updates come from when they were made for the audit."""
    images = _count(case, "images", "image")
    return [
        f"The private data are {images} of {value_of(case, 'data')}; the model is {value_of(case, 'model')}.",
        f"Each update is computed from {_count(case, 'batch_size', 'private image')}.",
        recipe(case.object("recipe")),
    ]


def _saved(trainings: Sequence[Fields]) -> list[str]:
    """Where the updates come from when they were saved in the middle of trainings."""
    sentences = []
    for one in trainings:
        rounds, clients = [n for n in one.items("rounds") if isinstance(n, int)], len(one.items("clients"))
        when = f", from {clients} client{'' if clients == 1 else 's'} in rounds {runs(rounds)}" if rounds else ""
        sentences.append(
            f"The updates of “{value_of(one, 'name')}” were saved while {value_of(one, 'model')} was trained on "
            f"{value_of(one, 'data')} with {in_sentence(value_of(one, 'defense'))}{when}."
        )
        if one.raw.get("batch_size") is not None:
            sentences.append(f"Each update is computed from {_count(one, 'batch_size', 'private image')}.")
        if one.raw.get("recipe") is not None:
            sentences.append(recipe(one.object("recipe")))
    return list(dict.fromkeys(sentences))


def runs(numbers: Sequence[int], to: str = " to ") -> str:
    """Numbers in a sentence, a run of them in short.

    >>> runs([1, 2, 3, 4, 31, 32])
    '1 to 4, 31, 32'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{run[0]}{to}{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)


def recipe(fields: Fields) -> str:
    """How the client trains, in a sentence."""
    mode = "training" if fields.flag("train_mode") else "evaluation"
    if fields.optional_text("sends") != "delta":
        return (
            f"The client sends the gradient of one step over its whole batch, with the model in {mode} mode (FedSGD)."
        )
    size = fields.number("batch_size")
    batches = "all images at once" if size is None else f"mini-batches of {_count(fields, 'batch_size', 'image')}"
    extras = [
        f"{key.replace('_', ' ')} {value:g}, " for key in ("momentum", "weight_decay") if (value := fields.number(key))
    ]
    return (
        f"The client trains for {_count(fields, 'epochs', 'epoch')} in {batches}, with learning rate "
        f"{value_of(fields, 'lr')}, {''.join(extras)}and the model in {mode} mode, "
        "then sends the change of its parameters (FedAvg)."
    )


def assumptions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What the adversary was assumed to know: sentences, each with where it holds ("" for everywhere)."""
    attacks = [row for row in rows if not row.is_prior]
    holders = _grouped((sentence, row) for row in attacks for sentence in row.assumptions)
    placed = [(sentence, where(held, attacks)) for sentence, held in holders.items()]
    return sorted(placed, key=lambda pair: pair[1] != "")


def flags(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Each flag, in the order of the rows, with where it was raised ("" for everywhere)."""
    raised = _grouped((flag, row) for row in rows for flag in row.flags)
    attacks = [row for row in rows if not row.is_prior]

    def among(held: Sequence[Row]) -> Sequence[Row]:
        return rows if any(row.is_prior for row in held) else attacks

    return [(flag, where(held, among(held))) for flag, held in raised.items()]


def where(held: Sequence[Row], among: Sequence[Row]) -> str:
    """In which of the rows something holds, as briefly as can be said: by defense, by attack, or one by one."""
    if len(held) == len(among):
        return ""
    defenses = dict.fromkeys(row.defense for row in held)
    if len(held) == sum(row.defense in defenses for row in among):
        return "against " + ", ".join(map(in_sentence, defenses))
    attacks = dict.fromkeys(map(attack_name, held))
    if len(held) == sum(attack_name(row) in attacks for row in among):
        return "for " + ", ".join(attacks)
    return "; ".join(map(row_name, held))


def logged(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What each defense wrote down while it ran: (defense, "key = value, ..."), the same only once."""
    lines = (
        (row.defense, ", ".join(f"{key} = {_short(value)}" for key, value in row.log.items()))
        for row in rows
        if row.log and not row.is_prior
    )
    return list(dict.fromkeys(lines))


def missing(rows: Sequence[Row]) -> list[str]:
    """Measures that could not be had, with the reason, each once."""
    names = {measure.key: measure.name for measure in MEASURES}
    lines = (f"{names.get(key, key)}: {reason}" for row in rows for key, reason in row.not_available.items())
    return list(dict.fromkeys(lines))


def _grouped(pairs: Iterable[tuple[str, Row]]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for key, row in pairs:
        groups.setdefault(key, []).append(row)
    return groups


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def value_of(fields: Fields, key: str) -> str:
    value = fields.raw.get(key)
    return "(not recorded)" if value is None else str(value)


def _count(fields: Fields, key: str, noun: str) -> str:
    number = number_or_none(fields.raw.get(key))
    if number is None:
        return f"an unrecorded number of {noun}s"
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
