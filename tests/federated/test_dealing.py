"""Partitions hold every example once, repeat under the same seed, and are as skewed as asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.federated.partition import dirichlet, iid, shards

Partition = Callable[[Tensor, int, torch.Generator], list[Tensor]]

KINDS: dict[str, Partition] = {
    "iid": iid,
    "dirichlet 0.01": partial(dirichlet, alpha=0.01),
    "dirichlet 1": partial(dirichlet, alpha=1.0, minimum=0),
    "dirichlet 0.1 equal": partial(dirichlet, alpha=0.1, equal=True),
    "dirichlet 100": partial(dirichlet, alpha=100.0, minimum=2),
    "shards 1": partial(shards, each=1),
    "shards 2": shards,
}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def label_counts(labels: Tensor, parts: list[Tensor], classes: int) -> Tensor:
    """[clients, classes]."""
    return torch.stack([torch.bincount(labels[part], minlength=classes) for part in parts])


@pytest.mark.parametrize("kind", KINDS)
@given(
    labels=st.lists(st.integers(0, 6), min_size=24, max_size=120), clients=st.integers(1, 12), seed=st.integers(0, 99)
)
@settings(deadline=None, max_examples=60)
def test_every_example_goes_to_exactly_one_client(kind: str, labels: list[int], clients: int, seed: int) -> None:
    tensor = torch.tensor(labels)
    parts = KINDS[kind](tensor, clients, rng(seed))
    assert len(parts) == clients
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels)))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    again = KINDS[kind](tensor, clients, rng(seed))
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert tensor.tolist() == labels


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_deals_otherwise(kind: str) -> None:
    labels = torch.arange(200) % 10
    a, b = KINDS[kind](labels, 5, rng(0)), KINDS[kind](labels, 5, rng(1))
    assert any(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_iid_shares_are_equal_and_mixed() -> None:
    labels = torch.arange(1003) % 10
    parts = iid(labels, 10, rng())
    assert {len(part) for part in parts} == {100, 101}
    assert int(label_counts(labels, parts, 10).min()) > 0


def test_dirichlet_spreads_each_class_by_the_drawn_proportions() -> None:
    # The textbook way, class by class, from the same draws: shuffled positions, a seed, proportions.
    labels = torch.randint(0, 7, (5000,), generator=rng(3))
    parts = dirichlet(labels, 11, rng(5), alpha=0.5, minimum=0)
    source = rng(5)
    torch.randperm(5000, generator=source)
    seed = int(torch.randint(2**63 - 1, (), generator=source))
    rows = np.random.default_rng(seed).dirichlet(np.full(11, 0.5), size=7)
    expected = np.stack(
        [np.diff(np.round(np.cumsum(row) * int((labels == k).sum())), prepend=0) for k, row in enumerate(rows)]
    )
    np.testing.assert_array_equal(label_counts(labels, parts, 7).T.numpy(), expected)


def test_dirichlet_goes_from_one_class_each_to_even_shares() -> None:
    labels = torch.arange(10_000) % 10
    largest_share = {}
    for alpha in (0.001, 0.1, 1.0, 1e6):
        counts = label_counts(labels, dirichlet(labels, 10, rng(), alpha=alpha), 10)
        largest_share[alpha] = float((counts / counts.sum(0)).max(0).values.mean())
    assert list(largest_share.values()) == sorted(largest_share.values(), reverse=True)
    assert largest_share[0.001] > 0.99
    assert largest_share[1e6] == pytest.approx(0.1, abs=0.002)


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 0.01, 1.0])
@pytest.mark.parametrize("minimum", [1, 5, 20])
def test_dirichlet_leaves_nobody_short(alpha: float, minimum: int) -> None:
    labels = torch.arange(400) % 10
    parts = dirichlet(labels, 20, rng(), alpha=alpha, minimum=minimum)
    assert min(len(part) for part in parts) >= minimum
    assert sum(len(part) for part in parts) == 400


@given(
    labels=st.lists(st.integers(0, 6), min_size=24, max_size=120), clients=st.integers(1, 12), seed=st.integers(0, 99)
)
@settings(deadline=None, max_examples=60)
def test_equal_shares_differ_by_one_example_at_most(labels: list[int], clients: int, seed: int) -> None:
    sizes = [len(part) for part in dirichlet(torch.tensor(labels), clients, rng(seed), alpha=0.1, equal=True)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("absent", [[4], [0, 1, 5]])
def test_equal_shares_are_as_skewed_where_classes_are_absent(absent: list[int]) -> None:
    labels = torch.arange(10_000) % 10
    some = labels[~torch.isin(labels, torch.tensor(absent))]
    # The skew: the part of a client's examples that are of its most frequent class.
    whole, without = (
        float(
            (label_counts(y, dirichlet(y, 10, rng(), alpha=0.1, equal=True), 10).max(1).values / (len(y) / 10)).mean()
        )
        for y in (labels, some)
    )
    assert whole > 0.5
    assert without > 0.5


def test_the_split_of_published_results_stays() -> None:
    # As the training runs in docs/results split CIFAR-10: whoever changes this has to run them again.
    labels = (torch.arange(50_000) % 10)[torch.randperm(50_000, generator=rng(7))]
    parts = dirichlet(labels, 100, rng(), alpha=0.5, equal=True)
    assert {len(part) for part in parts} == {500}
    assert hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16] == "6ae967a5a52d5bb4"


def test_shards_give_each_client_few_labels() -> None:
    labels = torch.randperm(10_000, generator=rng(1)) % 10
    parts = shards(labels, 50, rng(), each=2)
    counts = label_counts(labels, parts, 10)
    assert (counts > 0).sum(1).max() <= 2
    assert {len(part) for part in parts} == {200}
    assert len({tuple(row) for row in (counts > 0).tolist()}) > 10  # not everybody the same pair


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: iid(torch.zeros(3), 4, rng()), "3 examples are too few for 4 clients"),
        (lambda: iid(torch.zeros(3), 0, rng()), "at least one client, not 0"),
        (lambda: shards(torch.zeros(7), 4, rng()), "7 examples are too few for 4 clients with at least 2 each"),
        (lambda: shards(torch.zeros(7), 4, rng(), each=0), "at least one shard"),
        (lambda: dirichlet(torch.zeros(7), 4, rng(), alpha=0.0), "alpha must be above 0"),
        (lambda: dirichlet(torch.zeros(7), 4, rng(), alpha=float("nan")), "alpha must be above 0"),
        (lambda: dirichlet(torch.zeros(7), 4, rng(), alpha=float("inf")), r"at most 1e\+09, not inf; .* use iid"),
        (lambda: dirichlet(torch.zeros(7), 4, rng(), alpha=1e308), r"at most 1e\+09, not 1e\+308"),
        (lambda: dirichlet(torch.zeros(7), 4, rng(), alpha=1.0, minimum=2), "too few for 4 clients"),
    ],
)
def test_what_cannot_be_dealt_is_explained(call: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(GradveilError, match=complaint):
        call()
