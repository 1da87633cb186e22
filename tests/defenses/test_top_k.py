from __future__ import annotations

import pytest
import torch

from gradveil.core.seeding import generator
from gradveil.defenses.outpost import TopKPerLayer


def largest(values: torch.Tensor, *counts: int) -> list[torch.Tensor]:
    return TopKPerLayer([len(values)], *([count] for count in counts))(values)


@pytest.mark.parametrize("counts", [(0, 7), (30, 12), (1, 100), (100, 0), (99, 98)])
def test_so_many_and_the_largest(counts: tuple[int, int]) -> None:
    values = torch.randn(100, generator=generator(0)).abs()
    for count, mask in zip(counts, largest(values, *counts), strict=True):
        assert set(values[mask].tolist()) == set(values.sort(descending=True).values[:count].tolist())


@pytest.mark.parametrize("kind", ["normal", "mostly zero", "sorted", "constant"])
def test_a_large_one(kind: str) -> None:
    values = torch.randn(200_000, generator=generator(1)).abs()
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


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_parts_side_by_side(device: str) -> None:
    sizes, values = [5, 1, 300], torch.randn(306, generator=generator(2)).abs().to(device)
    values[10:200] = 0.5  # ties
    counts = [2, 1, 90], [0, 0, 300]
    choose = TopKPerLayer(sizes, *counts)
    for few, mask, places in zip(counts, choose(values), choose.places(values), strict=True):
        for count, part, chosen in zip(few, values.split(sizes), mask.split(sizes), strict=True):
            assert chosen.tolist() == largest(part.cpu(), count)[0].tolist()
        assert places.sort().values.tolist() == mask.nonzero().flatten().tolist()
        first, second = few[0], few[0] + few[1]
        assert (places[:first] < 5).all(), "part by part"
        assert (places[first:second] == 5).all()


@pytest.mark.parametrize("size", [100, 20_000])
def test_what_is_not_a_number_counts_as_the_largest(size: int) -> None:
    values = torch.rand(size, generator=generator(3))
    values[5:9] = float("nan")
    few, many = largest(values, 2, 50)
    assert few.nonzero().flatten().tolist() == [5, 6]
    assert int(many.sum()) == 50
    assert many[5:9].all()
