"""How sure a share is, and whether luck explains it: exact at any number, for examples that stand or fall together.

The examples behind one update are rebuilt together or not at all, so that updates are counted, not examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradveil.core.errors import GradveilError

Array = npt.NDArray[np.float64]
DRAWS = 20_000
"""Line-ups that are drawn to see what luck does; no probability below 1 in DRAWS is claimed."""


def interval(found: Sequence[float], size: int = 1, *, confidence: float = 0.95) -> tuple[float, float]:
    """Where a share lies, with at least this confidence. ``found`` has the hits among the ``size`` examples of updates.

    Of updates with one example each it is the exact interval of Clopper and Pearson. Of others it is Hoeffding's bound
    by relative entropy, which holds whatever the shares of one update depend on: every share q is kept for which
    n KL(mean, q) is at most log(2 / (1 - confidence)).

    >>> [round(end, 3) for end in interval([0] * 10)]
    [0.0, 0.308]
    >>> [round(end, 3) for end in interval([4, 2, 3, 3], size=4)]
    [0.146, 0.997]
    """
    n, outside = len(found), 1 - confidence
    if not n:
        return 0.0, 1.0
    mean = math.fsum(found) / (n * size)
    if size == 1:
        from scipy.special import betaincinv  # not scipy.stats, which takes a second to load

        hits = round(mean * n)
        low = float(betaincinv(hits, n - hits + 1, outside / 2)) if hits else 0.0
        return low, float(betaincinv(hits + 1, n - hits, 1 - outside / 2)) if hits < n else 1.0
    most = math.log(2 / outside) / n

    def away(q: float) -> float:
        parts = ((mean, q), (1 - mean, 1 - q))
        return sum(p * math.log(p / of) for p, of in parts if p > 0) if 0 < q < 1 else math.inf

    ends = []
    for end in (0.0, 1.0):
        near = mean
        for _ in range(60):  # halving leaves nothing that a float could tell
            middle = (near + end) / 2
            near, end = (middle, end) if away(middle) <= most else (near, middle)
        ends.append(end)
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
    updates, size = truths.shape
    if updates * size > picks.shape[1] or len(picks) != updates:
        raise GradveilError(f"{updates} updates of {size} examples cannot be drawn from {picks.shape[1]} candidates")
    of_update = np.repeat(np.arange(updates), size)
    found = picks[of_update, truths.ravel()].sum()
    rng, as_good, left = np.random.default_rng(seed), 0, draws
    while left:
        part = min(left, max(1, 2**22 // picks.shape[1]))
        drawn = rng.random((part, picks.shape[1])).argsort(axis=1)[:, : updates * size]
        as_good += int((picks[of_update, drawn].sum(axis=1) >= found - 1e-9).sum())
        left -= part
    return (1 + as_good) / (1 + draws)


def better(shares: Sequence[float], others: Sequence[float]) -> float:
    """How likely ``shares`` are so much above ``others`` of the same updates if the two are equally good: exact.

    If they are, each difference could as well have the other sign. All choices of signs are counted.

    >>> better([1, 1, 1, 1, 0], [0, 0, 0, 0, 0])
    0.0625
    """
    differences = [round(a - b, 9) for a, b in zip(shares, others, strict=True) if abs(a - b) > 1e-9]
    counts = {0.0: 1}  # how many choices of signs give each sum
    for difference in differences:
        after: dict[float, int] = {}
        for total, ways in counts.items():
            for turned in (difference, -difference):
                key = round(total + turned, 9)
                after[key] = after.get(key, 0) + ways
        counts = after
    found = math.fsum(differences)
    as_good = sum(ways for total, ways in counts.items() if total >= found - 1e-6)
    return as_good / (1 << len(differences))


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
