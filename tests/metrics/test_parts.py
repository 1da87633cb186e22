"""Matching, ranks and labels."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import binomtest

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.metrics import METRICS, label_accuracy, label_chance, matched, mse, picks, ranks, wilson


def test_matching_undoes_a_permutation_of_real_images() -> None:
    truth = load("cifar10-samples").batch(range(16))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    noise = 0.05 * torch.randn(truth.inputs.shape, generator=torch.Generator().manual_seed(1))
    guess = Batch((truth.inputs + noise)[order], truth.labels[order])
    before = guess.inputs.clone()
    found = matched(guess, truth)
    assert torch.equal(found.labels, truth.labels)
    assert torch.equal(found.inputs, truth.inputs + noise)
    assert torch.equal(guess.inputs, before)
    assert found is not guess


def test_matching_is_the_best_of_all_orders() -> None:
    rng = torch.Generator().manual_seed(0)
    guess, truth = (Batch(torch.rand(5, 1, 4, 4, generator=rng), torch.arange(5)) for _ in range(2))
    found = mse(matched(guess, truth).inputs, truth.inputs).sum()
    best = min(mse(guess.inputs[list(order)], truth.inputs).sum() for order in itertools.permutations(range(5)))
    assert float(found) == pytest.approx(float(best), rel=1e-6)


def test_matching_leaves_what_is_not_finite_for_last() -> None:
    truth = Batch(torch.rand(3, 1, 4, 4), torch.arange(3))
    broken = torch.full((1, 4, 4), float("nan"))
    guess = Batch(torch.stack([broken, truth.inputs[0], truth.inputs[2]]), torch.tensor([9, 0, 2]))
    assert matched(guess, truth).labels.tolist() == [0, 9, 2]
    hopeless = Batch(torch.full((3, 1, 4, 4), float("inf")), torch.arange(3))
    assert sorted(matched(hopeless, truth).labels.tolist()) == [0, 1, 2]


def test_matching_needs_equal_shapes() -> None:
    with pytest.raises(GradveilError, match=r"\[2, 1, 4, 4\] and \[3, 1, 4, 4\]"):
        matched(Batch(torch.rand(2, 1, 4, 4), torch.arange(2)), Batch(torch.rand(3, 1, 4, 4), torch.arange(3)))


def test_ties_count_as_a_draw_would_on_average() -> None:
    distances = torch.tensor([[0.3, 0.1, 0.2], [0.1, 0.1, 0.1], [0.0, 0.5, 0.5], [torch.inf, torch.nan, torch.inf]])
    assert ranks(distances, torch.tensor([1, 2, 0, 1])).tolist() == [1, 2, 1, 2]
    assert ranks(distances, torch.tensor([0, 0, 1, 0])).tolist() == [3, 2, 2.5, 2]
    assert picks(distances).tolist() == [[0, 1, 0], [1 / 3] * 3, [1, 0, 0], [1 / 3] * 3]
    assert picks(distances, 2).tolist() == [[0, 1, 1], [2 / 3] * 3, [1, 0.5, 0.5], [2 / 3] * 3]
    assert picks(distances, 5).tolist() == [[1, 1, 1]] * 4


def test_expected_places_are_the_mean_over_draws() -> None:
    rng = torch.Generator().manual_seed(0)
    distances = torch.randint(0, 4, (1, 9), generator=rng).double()
    drawn = torch.stack([(distances[0] + 0.5 * torch.rand(9, generator=rng)).argsort().argsort() for _ in range(4000)])
    for size in (1, 3):
        torch.testing.assert_close(picks(distances, size)[0], (drawn < size).double().mean(dim=0), atol=0.04, rtol=0)
    places = ranks(distances.expand(9, -1), torch.arange(9))
    torch.testing.assert_close(places, 1 + drawn.double().mean(dim=0), atol=0.15, rtol=0)


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (1, 8), (4, 8), (64, 64), (1, 1000)])
def test_wilson_is_that_of_scipy(successes: int, n: int) -> None:
    interval = binomtest(successes, n).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((interval.low, interval.high), abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_best_guess_of_labels_is_the_best_of_all_guesses(size: int) -> None:
    shares = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    drawn = list(itertools.product(range(3), repeat=size))
    chances = [float(shares[list(labels)].prod()) for labels in drawn]

    def worth(guess: tuple[int, ...]) -> float:
        right = [label_accuracy(torch.tensor(guess), torch.tensor(labels)) for labels in drawn]
        return sum(chance * share for chance, share in zip(chances, right, strict=True))

    best = max(map(worth, itertools.combinations_with_replacement(range(3), size)))
    assert label_chance(shares, size) == pytest.approx(best)
    assert label_chance(torch.tensor([7]), size) == 1.0


@pytest.mark.parametrize(
    ("guess", "truth", "share"),
    [([1, 2, 3, 4], [4, 3, 2, 1], 1.0), ([5, 5, 5, 5], [5, 5, 1, 2], 0.5), ([0], [1], 0.0), ([-1, 3], [3, 3], 0.5)],
)
def test_labels_are_compared_as_a_multiset(guess: list[int], truth: list[int], share: float) -> None:
    assert label_accuracy(torch.tensor(guess), torch.tensor(truth)) == share


def test_each_metric_knows_its_name_and_direction() -> None:
    assert all(name == metric.name and metric.title for name, metric in METRICS.items())
    leaks_by_more = {name for name, metric in METRICS.items() if metric.direction == "higher"}
    assert leaks_by_more == {"psnr", "ssim", "identified", "ranked_first", "label_correct", "label_accuracy"}
