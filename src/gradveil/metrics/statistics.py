"""How sure a share is, and whether luck explains it: exact at any number, for examples that stand or fall together.

The examples behind one update are rebuilt together or not at all, so that updates are counted, not examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradveil.core.errors import GradveilError

Array = npt.NDArray[np.floating]
DRAWS = 20_000
"""Line-ups that are drawn to see what luck does; no probability below 1 in DRAWS is claimed."""
FALSE_ALARMS = 0.01
"""The share of others that may be taken for members."""
LEAST_DRAWS, WORK = 4_000, 2**23
"""At least this many line-ups are drawn, with about this many examples in all: of more examples fewer line-ups."""


def interval(
    found: Sequence[float], sizes: int | Sequence[int] = 1, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Where a share lies, with at least this confidence. ``found`` has the hits among the examples of each update.

    Of updates with one example each it is the exact interval of Clopper and Pearson. Of others, and where ties give
    hits that are no whole numbers, it is Hoeffding's bound by relative entropy, which holds whatever the hits of one
    update depend on: every share q is kept for which n KL(mean, q) is at most log(2 / (1 - confidence)). The mean is of
    hits in units of the largest update, so that each of them is between 0 and 1.

    >>> [round(end, 3) for end in interval([0] * 10)]
    [0.0, 0.308]
    >>> [round(end, 3) for end in interval([4, 2, 3, 3], 4)]
    [0.146, 0.997]
    """
    n, outside = len(found), 1 - confidence
    if not n:
        return 0.0, 1.0
    each = [sizes] * n if isinstance(sizes, int) else list(sizes)
    most, total = max(each), math.fsum(found)
    if most == 1 and all(float(hit).is_integer() for hit in found):
        from scipy.special import betaincinv  # not scipy.stats, which takes a second to load

        hits = round(total)
        low = float(betaincinv(hits, n - hits + 1, outside / 2)) if hits else 0.0
        return low, float(betaincinv(hits + 1, n - hits, 1 - outside / 2)) if hits < n else 1.0
    mean, far = min(1.0, total / (n * most)), math.log(2 / outside) / n

    def away(q: float) -> float:
        parts = ((mean, q), (1 - mean, 1 - q))
        return sum(p * math.log(p / of) for p, of in parts if p > 0) if 0 < q < 1 else math.inf

    ends = []
    for end in (0.0, 1.0):
        near = mean
        for _ in range(60):  # halving leaves nothing that a float could tell
            middle = (near + end) / 2
            near, end = (middle, end) if away(middle) <= far else (near, middle)
        ends.append(min(1.0, end * n * most / sum(each)))
    return ends[0], ends[1]


def luck(picks: Array, truths: npt.NDArray[np.int64], *, seed: int = 0, draws: int = DRAWS) -> float:
    """How likely picks that know nothing do as well: an upper bound that holds for any attack, at any number.

    ``picks`` [updates, candidates] says how much of each candidate an attack names for each update: 1 for one that it
    names, a half for each of two that it cannot tell apart. ``truths`` [updates, B] says which are behind it. Which of
    the candidates are private, and behind which update, was drawn; if the updates say nothing, any other draw was as
    likely. So other draws are made, and those counted that the picks fit as well as the truth.

    >>> one_of_many = np.zeros((4, 100))
    >>> one_of_many[:, 7] = 1.0  # the same for all: right once in any draw that holds it
    >>> 0.03 < luck(one_of_many, np.array([[7], [1], [2], [3]])) < 0.05
    True
    """
    (updates, size), count = truths.shape, picks.shape[1]
    slots = updates * size
    if slots > count or len(picks) != updates:
        raise GradveilError(f"{updates} updates of {size} examples cannot be drawn from {count} candidates")
    of_update = np.repeat(np.arange(updates), size)
    found = picks[of_update, truths.ravel()].sum()
    draws = min(draws, max(LEAST_DRAWS, WORK // slots))
    rng, as_good, left = np.random.default_rng(seed), 0, draws
    while left:
        part = min(left, max(1, 2**20 // slots))
        drawn = _injections(rng, part, slots, count)
        as_good += part - int((picks[of_update, drawn].sum(axis=1) < found - 1e-9).sum())  # NaN is as good as any
        left -= part
    return (1 + as_good) / (1 + draws)


def _injections(rng: np.random.Generator, number: int, slots: int, count: int) -> npt.NDArray[np.int64]:
    """[number, slots]: different ones of ``count`` for all slots, all choices and orders as likely.

    Slots that drew what an earlier one holds draw again until none does. Nothing in that prefers a candidate to
    another, so that in the end none is preferred.
    """
    if count < 4 * slots:
        return rng.random((number, count)).argsort(axis=1)[:, :slots]
    drawn = rng.integers(count, size=(number, slots))
    while True:
        order = drawn.argsort(axis=1, kind="stable")
        inorder = np.take_along_axis(drawn, order, axis=1)
        rows, places = np.nonzero(inorder[:, 1:] == inorder[:, :-1])
        if not len(rows):
            return drawn
        drawn[rows, order[rows, places + 1]] = rng.integers(count, size=len(rows))


def better(shares: Sequence[float], others: Sequence[float]) -> float:
    """How likely ``shares`` are so much above ``others`` of the same updates if the two are equally good: exact.

    If they are, each difference could as well have the other sign. All choices of signs are counted; where differences
    have no common unit, some are drawn.

    >>> better([1, 1, 1, 1, 0], [0, 0, 0, 0, 0])
    0.0625
    """
    differences = np.array([a - b for a, b in zip(shares, others, strict=True)], dtype=np.float64)
    found = differences.sum()
    for unit in range(1, 65):
        whole = np.rint(differences * unit).astype(np.int64)
        if np.abs(differences * unit - whole).max(initial=0.0) < 1e-6:
            break
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(DRAWS // 4, len(differences)))
        return float(1 + (signs @ differences >= found - 1e-9).sum()) / (1 + len(signs))
    steps = np.abs(whole[whole != 0])
    middle = int(steps.sum())
    chances = np.zeros(2 * middle + 1)  # of each sum of differences, from the least to the largest
    chances[middle] = 1.0
    for step in steps:
        chances = (np.roll(chances, step) + np.roll(chances, -step)) / 2  # nothing goes round: sums are within reach
    return float(chances[middle + int(whole.sum()) :].sum())


def holm(chances: Sequence[float]) -> list[float]:
    """Each probability as it counts if several attacks were tried and the best is shown (Holm, 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order, worst, found = sorted(range(len(chances)), key=lambda i: chances[i]), 0.0, [0.0] * len(chances)
    for place, i in enumerate(order):
        worst = max(worst, min(1.0, (len(chances) - place) * chances[i]))
        found[i] = worst
    return found


def standing_out(scores: Array) -> Array:
    """How far each candidate stands out of its own list, of scores [updates, candidates] of which low ones are good.

    The median less the score, in units of the median distance to it or, where most are equal, of the mean distance.

    >>> standing_out(np.array([[1.0, 3.0, 5.0, 4.0, 2.0]])).tolist()
    [[2.0, 0.0, -2.0, -1.0, 1.0]]
    """
    away = np.median(scores, axis=1, keepdims=True) - scores
    typical = np.median(np.abs(away), axis=1, keepdims=True)
    units = np.where(typical > 0, typical, np.mean(np.abs(away), axis=1, keepdims=True))
    found: Array = away / np.where(units > 0, units, 1.0)
    return found


def surprise(held: Array, lacking: Array) -> tuple[Array, Array]:
    """How unusual scores [updates, candidates] of both lists are among those of the list without members; high is rare.

    A score counts as it is, as for an attack that knows how well a true candidate fits, and by how far it stands out of
    its own list, as where noise moves all scores of an update. The rarer of the two counts, for both lists alike.
    """
    lists = [np.nan_to_num(each.astype(np.float64), nan=1e250).clip(-1e250, 1e250) for each in (held, lacking)]
    rare = [np.ones(each.shape) for each in lists]
    for views in ([-each for each in lists], [standing_out(each) for each in lists]):
        others = np.sort(views[1].ravel())
        for number, view in enumerate(views):
            share = 1 - np.searchsorted(others, view, side="left") / len(others)
            rare[number] = np.minimum(rare[number], share)
    return -rare[0], -rare[1]


def alarms(held: Array, lacking: Array) -> Array:
    """[updates, candidates]: 1 for each of ``held`` that a test takes for a member, which one in a hundred others pass.

    Both say how unusual examples are; ``lacking`` holds no members.
    """
    everybody = np.sort(lacking.ravel())[::-1]
    raised: Array = (held > everybody[int(FALSE_ALARMS * len(everybody))]).astype(np.float64)
    return raised


def advantage(members: Array, others: Array) -> float | None:
    """By how much true alarms are more frequent than false ones; None for one update.

    The threshold of an update is the best for all others, so that it is not chosen by what it is judged by.
    """
    if len(members) < 2:
        return None
    tried = np.unique(np.quantile(np.concatenate([members.ravel(), others.ravel()]), np.linspace(0, 1, 257)))
    ahead = []
    for true, false in zip(np.sort(members, axis=1), np.sort(others, axis=1), strict=True):
        below = [np.searchsorted(each, tried, side="right") / len(each) for each in (true, false)]
        ahead.append(below[1] - below[0])  # the share of alarms is one less those below
    gains = np.stack(ahead)
    best = (gains.sum(axis=0) - gains).argmax(axis=1)
    return float(gains[np.arange(len(gains)), best].mean())
