"""Intervals that cover, tests that keep their level: by simulation, and against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from gradveil.core.errors import GradveilError
from gradveil.metrics.statistics import (
    _injections,
    advantage,
    alarms,
    better,
    holm,
    interval,
    luck,
    standing_out,
    surprise,
)


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
    wide, narrow = interval([2, 1] * 4, 4), interval([2, 1] * 40, 4)
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


def test_updates_of_different_sizes_and_ties_have_an_interval_too() -> None:
    low, high = interval([4, 1, 0], [4, 2, 2])
    assert low < 5 / 8 < high
    assert interval([4, 4, 2, 2], [4, 4, 2, 2])[1] == 1.0
    assert interval([0.01] * 100)[1] < 0.08
    assert interval([0.5] * 10)[0] < 0.5 < interval([0.5] * 10)[1]


def test_large_audits_are_counted_and_draw_without_preference() -> None:
    rng = np.random.default_rng(0)
    truths = rng.permutation(20_000)[:1000].reshape(1000, 1)
    picks = np.zeros((1000, 20_000), dtype=np.float32)
    picks[np.arange(1000), truths[:, 0]] = 1
    assert luck(picks, truths) < 0.001
    assert better([1.0] * 600 + [0.0] * 400, [0.0] * 1000) < 1e-9
    assert better(rng.random(1000).tolist(), rng.random(1000).tolist()) > 0.001
    drawn = _injections(rng, 4000, 3, 20)
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    for slot in range(3):
        assert np.bincount(drawn[:, slot], minlength=20) == pytest.approx(np.full(20, 200), abs=60)


def test_who_always_names_somebody_finds_no_members() -> None:
    """Scores of lists with and without the truth; one-hot on the best of either says nothing of who is a member."""
    rng = np.random.default_rng(0)
    updates, candidates = 40, 60
    held, lacking = rng.normal(size=(updates, candidates)), rng.normal(size=(updates, candidates))
    held[:, 0] -= 8  # the truth, and easy to find
    sure = surprise(held, lacking)
    assert alarms(sure[0][:, :1], sure[1]).mean() > 0.95
    assert (advantage(sure[0][:, :1], sure[1]) or 0) > 0.9
    moved = 100 * rng.normal(size=(updates, 1))  # noise that all scores of an update share
    apart = surprise(held + moved, lacking + moved)
    assert alarms(apart[0][:, :1], apart[1]).mean() > 0.8
    scaled = np.exp(20 * rng.random((updates, 1)))  # nobody else comes near zero, but in units of the list some do
    exact = np.concatenate([np.zeros((updates, 1)), np.exp(held[:, 1:])], axis=1)
    found = surprise(scaled * exact, scaled * np.exp(lacking))
    assert alarms(found[0][:, :1], found[1]).mean() == 1
    named = surprise(*((scores > scores.min(axis=1, keepdims=True)).astype(float) for scores in (held, lacking)))
    assert alarms(named[0][:, :1], named[1]).mean() == 0, "one of 60 is named where nobody should be"
    assert advantage(named[0][:, :1], named[1]) == pytest.approx(1 - 1 / 60, abs=0.02)


def test_members_that_are_like_others_are_found_as_seldom() -> None:
    rng = np.random.default_rng(0)
    held, lacking = surprise(rng.normal(size=(400, 100)), rng.normal(size=(400, 100)))
    assert alarms(held[:, :4], lacking).mean() == pytest.approx(0.01, abs=0.008)
    assert abs(advantage(held[:, :4], lacking) or 0) < 0.06
    equal, _ = surprise(np.zeros((5, 100)), np.zeros((5, 100)))
    assert alarms(equal[:, :1], equal).sum() == 0
    assert advantage(equal[:, :1], equal) == 0
    odd, _ = surprise(np.array([[np.nan, np.inf, -np.inf, 1.0, 2.0]]), np.arange(5.0)[None])
    assert odd.argmax() == 2
    assert standing_out(np.ones((2, 3))).tolist() == [[0.0] * 3] * 2
