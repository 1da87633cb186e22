"""Intervals that cover, tests that keep their level: by simulation, and against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from gradveil.core.errors import GradveilError
from gradveil.metrics.statistics import better, holm, interval, luck


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (57, 100), (1, 1000)])
def test_single_examples_have_the_exact_interval(hits: int, n: int) -> None:
    exact = stats.binomtest(hits, n).proportion_ci(method="exact")
    assert interval([1] * hits + [0] * (n - hits)) == pytest.approx((exact.low, exact.high))


@pytest.mark.parametrize("together", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize(("updates", "size"), [(4, 8), (25, 4), (100, 2)])
def test_intervals_cover_examples_that_stand_or_fall_together(
    updates: int, size: int, share: float, together: float
) -> None:
    rng = np.random.default_rng(0)
    missed, audits = 0, 400
    for _ in range(audits):
        alike = rng.random(updates) < together
        own = rng.random((updates, size)) < share
        found = np.where(alike, size * own[:, 0], own.sum(axis=1))
        low, high = interval(found.tolist(), size)
        missed += not low <= share <= high
    assert missed <= 0.05 * audits + 3 * np.sqrt(0.05 * 0.95 * audits)


def test_an_interval_holds_its_share_and_shrinks() -> None:
    wide, narrow = interval([2, 1] * 4, size=4), interval([2, 1] * 40, size=4)
    assert 0 <= wide[0] < narrow[0] < 0.375 < narrow[1] < wide[1] <= 1
    assert interval([]) == (0.0, 1.0)


def named(choice: np.ndarray, candidates: int) -> np.ndarray:
    picks = np.zeros((len(choice), candidates))
    picks[np.arange(len(choice))[:, None], choice] = 1.0
    return picks


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("habit", ["at random", "always the same", "a favourite few", "undecided"])
def test_what_holds_nothing_is_seldom_above_luck(size: int, habit: str) -> None:
    rng = np.random.default_rng(1)
    updates, candidates, audits, seldom = 6, 100, 300, 0
    for audit in range(audits):
        truths = rng.permutation(candidates)[: updates * size].reshape(updates, size)
        if habit == "at random":
            choice = np.stack([rng.permutation(candidates)[:size] for _ in range(updates)])
        elif habit == "always the same":
            choice = np.tile(np.arange(size), (updates, 1))
        else:
            choice = np.stack([rng.permutation(2 * size)[:size] for _ in range(updates)])
        picks = np.full((updates, candidates), size / candidates) if habit == "undecided" else named(choice, candidates)
        seldom += luck(picks, truths, seed=audit, draws=400) <= 0.05
    assert seldom <= 0.05 * audits + 3 * np.sqrt(0.05 * 0.95 * audits)


def test_what_is_known_is_far_above_luck() -> None:
    truths = np.arange(16).reshape(8, 2)
    assert luck(named(truths, 100), truths) < 1e-4
    one = np.arange(4)[:, None]
    assert luck(named(one, 100), one) < 1e-4
    assert luck(named(one[:1], 100), one[:1]) == pytest.approx(0.01, abs=0.003)


def test_luck_needs_enough_candidates() -> None:
    with pytest.raises(GradveilError, match="4 updates of 8 examples cannot be drawn from 20"):
        luck(np.zeros((4, 20)), np.zeros((4, 8), dtype=np.int64))


def test_better_is_the_sign_test_for_single_examples() -> None:
    ours, theirs = [1, 1, 1, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1]
    assert better(ours, theirs) == pytest.approx(stats.binomtest(5, 6, alternative="greater").pvalue)
    assert better(ours, ours) == 1.0


def test_better_is_scipys_permutation_test_for_shares() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.integers(0, 5, 10) / 4, rng.integers(0, 4, 10) / 4
    exact = stats.permutation_test(
        (ours, theirs), lambda a, b: (a - b).sum(), permutation_type="samples", alternative="greater"
    )
    assert better(ours.tolist(), theirs.tolist()) == pytest.approx(exact.pvalue)


def test_holm_keeps_the_order_and_the_level() -> None:
    assert holm([0.2]) == [0.2]
    assert holm([]) == []
    assert holm([0.5, 0.9, 0.4]) == [1.0, 1.0, 1.0]
    rng = np.random.default_rng(0)
    assert np.mean([min(holm(rng.random(10).tolist())) <= 0.05 for _ in range(2000)]) <= 0.065
