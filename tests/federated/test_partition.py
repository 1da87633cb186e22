"""Partitions by name: every example exactly once, nobody empty, the same from the same seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.core.errors import GradveilError
from gradveil.federated import PARTITIONS, partition

SPECS = [
    "iid",
    "dirichlet:alpha=0.05",
    "dirichlet",
    "dirichlet:alpha=0.1,equal=true",
    "shards:each=1",
    "shards",
    "victim:examples=7",
]


@pytest.mark.parametrize("spec", SPECS)
@given(labels=st.lists(st.integers(0, 6), min_size=24, max_size=90), clients=st.integers(1, 12), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_every_example_goes_to_exactly_one_client(spec: str, labels: list[int], clients: int, seed: int) -> None:
    shares = partition(spec, torch.tensor(labels), clients=clients, seed=seed)
    assert len(shares) == clients
    assert all(len(share) > 0 for share in shares)
    assert torch.cat(shares).sort().values.tolist() == list(range(len(labels)))
    again = partition(spec, torch.tensor(labels), clients=clients, seed=seed)
    assert [share.tolist() for share in shares] == [share.tolist() for share in again]


def test_every_scheme_is_covered() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(PARTITIONS)


def test_equal_shares_are_equal_and_still_skewed() -> None:
    labels = torch.arange(1000) % 10
    shares = partition("dirichlet:alpha=0.1,equal=true", labels, clients=20, seed=0)
    assert {len(share) for share in shares} == {50}
    assert sum(int(torch.bincount(labels[share]).max()) > 15 for share in shares) > 15  # 5 of each would be even


def test_shards_hold_few_labels_and_iid_all() -> None:
    labels = torch.arange(1000) % 10
    assert all(len(labels[share].unique()) <= 3 for share in partition("shards:each=2", labels, clients=10, seed=0))
    assert all(len(labels[share].unique()) == 10 for share in partition("iid", labels, clients=10, seed=0))


def test_a_victim_has_few_examples_beside_clients_with_many() -> None:
    shares = partition("victim:examples=3", torch.arange(103) % 10, clients=3, seed=0)
    assert [len(share) for share in shares] == [3, 50, 50]


@pytest.mark.parametrize(
    "spec", ["dirichlet:alpha=0", "dirichlet:alpha=nan", "shards:each=0", "victim:examples=0", "shard", "iid:alpha=1"]
)
def test_a_bad_spec_is_refused(spec: str) -> None:
    with pytest.raises(GradveilError):
        partition(spec, torch.arange(10), clients=2, seed=0)


def test_more_clients_than_examples_are_refused() -> None:
    with pytest.raises(GradveilError, match="too few"):
        partition("iid", torch.arange(3), clients=4, seed=0)
