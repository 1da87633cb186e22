"""Precision, recall and Fréchet distance against hand-made cases and slow, plain programs."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from scipy import linalg
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.lab.generators import quality
from gradveil.lab.generators.quality import frechet, precision_recall


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_the_paper(points: Tensor, manifold: Tensor, k: int) -> float:
    """Equation 1 of Kynkäänniemi et al., one pair of points at a time."""
    inside = 0
    for point in points:
        for center in manifold:
            to_others = sorted(float((center - other).norm()) for other in manifold)
            if float((point - center).norm()) <= to_others[k]:
                inside += 1
                break
    return inside / len(points)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_precision_and_recall_are_those_of_the_paper(k: int) -> None:
    real, drawn = normal(0, 23, 2), normal(1, 17, 2) * 0.5 + 0.8
    precision, recall = precision_recall(real, drawn, k=k)
    assert precision == pytest.approx(by_the_paper(drawn, real, k))
    assert recall == pytest.approx(by_the_paper(real, drawn, k))
    assert 0 < recall < 1


def test_precision_and_recall_by_hand() -> None:
    line = torch.tensor([[0.0], [1.0], [2.0], [4.0], [8.0]])
    # The balls reach 2 from 0, 1 from 1, 2 from 2, 3 from 4 and 6 from 8: together from -2 to 14.
    drawn = torch.tensor([[-2.1], [-1.9], [13.9], [14.1]])
    assert precision_recall(line, drawn, k=2)[0] == 0.5
    same = precision_recall(line, line)
    assert same == (1.0, 1.0)
    collapsed = torch.full((5, 1), 2.0)
    assert precision_recall(line, collapsed) == (1.0, 0.2), "one good image again and again: precise, and that is all"
    assert precision_recall(line, line + 100) == (0.0, 0.0)


def test_many_points_are_taken_in_parts() -> None:
    real, drawn = normal(0, 1500, 3), normal(1, 1100, 3) + 1
    distances = torch.cdist(drawn.double(), real.double())
    radii = torch.cdist(real.double(), real.double()).sort(dim=1).values[:, 3]
    wanted = float((distances <= radii).any(dim=1).double().mean())
    assert precision_recall(real, drawn)[0] == pytest.approx(wanted, abs=2e-3)


def test_frechet_is_the_textbook_formula() -> None:
    mix = normal(2, 6, 6)
    a, b = normal(0, 200, 6) @ mix, normal(1, 300, 6) + 0.3
    first, second = np.cov(a.double().numpy().T), np.cov(b.double().numpy().T)
    root = linalg.sqrtm(first @ second)
    apart = (a.double().mean(0) - b.double().mean(0)).square().sum()
    assert frechet(a, b) == pytest.approx(float(apart) + float(np.trace(first + second - 2 * root.real)), rel=1e-6)
    assert frechet(a, b) == pytest.approx(frechet(b, a), rel=1e-6)


def test_frechet_by_hand() -> None:
    a = normal(0, 500, 3)
    assert frechet(a, a) == pytest.approx(0.0, abs=1e-9)
    assert frechet(a, a + torch.tensor([3.0, 0.0, 4.0])) == pytest.approx(25.0, rel=1e-4)
    deviations = a.double().std(dim=0)
    assert frechet(a, 3 * (a - a.mean(dim=0)) + a.mean(dim=0)) == pytest.approx(
        4 * float(deviations.square().sum()), rel=1e-4
    )
    fewer = normal(1, 4, 10), normal(2, 5, 10)  # fewer points than dimensions: singular covariances
    assert frechet(*fewer) > 0


def test_what_cannot_be_compared_is_said() -> None:
    for real, drawn in ((normal(0, 4, 2), normal(0, 4, 3)), (normal(0, 4), normal(0, 4))):
        with pytest.raises(GradveilError, match="of one d"):
            precision_recall(real, drawn)
        with pytest.raises(GradveilError, match="of one d"):
            frechet(real, drawn)
    with pytest.raises(GradveilError, match="k is at least 1 and below the number of points, not 4"):
        precision_recall(normal(0, 4, 2), normal(0, 9, 2), k=4)


def test_the_examples_are_right() -> None:
    assert doctest.testmod(quality) == (0, 3)
