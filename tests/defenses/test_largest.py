from __future__ import annotations

import pytest
import torch

from gradveil.core.seeding import generator
from gradveil.defenses.largest import largest


@pytest.mark.parametrize("counts", [(0, 7), (30, 12), (1, 100), (100, 0), (99, 98)])
def test_so_many_and_the_largest(counts: tuple[int, int]) -> None:
    values = torch.randn(100, generator=generator(0))
    for count, mask in zip(counts, largest(values, *counts), strict=True):
        assert set(values[mask].tolist()) == set(values.sort(descending=True).values[:count].tolist())


@pytest.mark.parametrize("kind", ["normal", "mostly zero", "sorted", "constant"])
def test_a_large_one_by_its_sample(kind: str) -> None:
    values = torch.randn(200_000, generator=generator(1))
    values = {"normal": values, "mostly zero": values * (values > 1), "sorted": values.sort().values}.get(
        kind, values * 0
    )
    for count in (1, 40_000, 80_000, 199_999):
        (mask,) = largest(values, count)
        assert int(mask.sum()) == count
        assert values[mask].min() >= values[~mask].max()


def test_ties_are_cut() -> None:
    values = torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0, 0.0])
    few, many = largest(values, 1, 4)
    assert few.tolist() == [False, True, False, False, False, False]
    assert many.tolist() == [True, True, True, False, True, False]
