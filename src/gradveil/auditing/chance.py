"""Whether luck explains what attacks found: exact tests, corrected for how many attacks were tried on a defense.

``docs/verdict.md`` derives each of them. Nothing here loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gradveil.auditing.audit import Row
from gradveil.metrics.statistics import better, holm

LEVEL = 0.05
"""A finding is above chance if luck does as well in at most so many of all audits of a defense that sends nothing."""
FALSE_ALARMS = 0.01
"""The share of others that a test for members may take for members."""


def above_chance(rows: Sequence[Row], every: Sequence[Row]) -> list[bool | None]:
    """Of all rows of attacks on one defense: whether each identified more than luck explains; None if not known.

    Luck is exact as long as a search without the update knows nothing of who is private. Where it does, its own row
    shows that, and the attack has to be better than that search, update by update.
    """
    lucky = [luck_of(row) for row in rows]
    priors = [row.prior_among(every) for row in rows]
    ahead = [None if prior is None else ahead_of(row, prior) for row, prior in zip(rows, priors, strict=True)]
    seldom, sure = (holm([1.0 if chance is None else chance for chance in chances]) for chances in (lucky, ahead))
    found: list[bool | None] = []
    for place, (row, prior) in enumerate(zip(rows, priors, strict=True)):
        suspect = prior is not None and (luck_of(prior) or 0.0) <= LEVEL and (prior.identified or 0.0) > 0
        if row.identified is None or lucky[place] is None:
            found.append(None)
        elif not suspect or seldom[place] > LEVEL:
            found.append(seldom[place] <= LEVEL)
        elif ahead[place] is None or 0.5 ** (row.updates or row.images) > LEVEL:
            found.append(None)  # so few updates cannot tell the attack from its prior, whatever it finds
        else:
            found.append(sure[place] <= LEVEL)
    return found


def luck_of(row: Row) -> float | None:
    """How likely picks that know nothing identify as many; None where nobody knows.

    Rows of older audits do not hold it. Of one image behind each update it is binomial.
    """
    if row.luck is not None or row.identified is None or row.at_random is None:
        return row.luck
    alone = row.updates == row.images if row.updates else round(row.at_random * (row.gallery or 0)) == 1
    return at_least(round(row.identified * row.images), row.images, row.at_random) if alone else None


def ahead_of(row: Row, other: Row) -> float | None:
    """How likely the row is so much better than another of the same updates if both are equally good."""
    shares, others = shares_of(row), shares_of(other)
    known = {image.index for image in row.per_image} == {image.index for image in other.per_image}
    return better(shares, others) if shares and known and len(shares) == len(others) else None


def shares_of(row: Row) -> list[float]:
    """The share of identified images of each update; empty where that is not known."""
    updates = row.updates or (row.images if luck_of(row) is not None else 0)
    shares = [image.identified if image.identified_share is None else image.identified_share for image in row.per_image]
    known = [float(share) for share in shares if share is not None]
    if not updates or not known or len(known) % updates:
        return []
    size = len(known) // updates
    return [sum(known[i : i + size]) / size for i in range(0, len(known), size)]


def at_least(count: int, trials: int, chance: float) -> float:
    """How likely so many of some trials succeed, or more.

    >>> round(at_least(1, 8, 0.01), 4), at_least(0, 8, 0.01)
    (0.0773, 1.0)
    """
    from scipy.special import betainc  # not scipy.stats, which takes a second to load

    return float(betainc(count, trials - count + 1, chance)) if count else 1.0


def label_luck(row: Row) -> float | None:
    """How likely a guess without the update gets as many labels right, at most; None where chance is not known.

    Of several images behind an update it is Hoeffding's bound by relative entropy, which counts updates.

    >>> from gradveil.auditing.audit import Files
    >>> row = Row(defense="none", attack="ig", images=8, updates=8, label_accuracy=0.5, label_chance=0.1,
    ...           files=Files(reconstruction=""))
    >>> round(label_luck(row), 4)
    0.005
    """
    share, chance, updates = row.label_accuracy, row.label_chance, row.updates
    if share is None or chance is None or not updates:
        return None
    if updates == row.images:
        return at_least(round(share * updates), updates, chance)
    if share <= chance:
        return 1.0
    if chance == 0:
        return 0.0
    away = share * math.log(share / chance) + ((1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0)
    return math.exp(-updates * away)


def member_luck(row: Row) -> float | None:
    """How likely a test finds as many members at 1% false alarms if members and others cannot be told apart: exact.

    Any order of all scores is then as likely. Members found stand before one false alarm more than are allowed: of so
    many scores from the top, at most the allowed ones are of others.
    """
    asked = row.member
    if asked is None or asked.found is None or not asked.members or not asked.others:
        return None
    size = max(1, round(row.images / row.updates)) if row.updates else 1  # examples of one update count once
    members, others = asked.members // size, asked.others // size
    found, alarms = math.floor(asked.found * members + 1e-9), math.floor(FALSE_ALARMS * others)
    top = found + alarms
    ways = sum(math.comb(others, i) * math.comb(members, top - i) for i in range(alarms + 1) if top - i >= 0)
    return ways / math.comb(members + others, top) if found else 1.0


def best_above(rows: Sequence[Row], luck: Callable[[Row], float | None], best: Row) -> bool | None:
    """Whether the best of these rows is above chance by this test, if all of them were tried; None if not known."""
    chances = [luck(row) for row in rows]
    if luck(best) is None:
        return None
    return holm([1.0 if chance is None else chance for chance in chances])[rows.index(best)] <= LEVEL
