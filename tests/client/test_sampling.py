"""Poisson batches held wrong: each misuse is one line that says what to do; no example costs more than is counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

import gradveil
from gradveil.core.errors import GradveilError

INPUTS, TARGETS = torch.randn(40, 4), torch.arange(40) % 3
DATA = TensorDataset(INPUTS, TARGETS)


def client() -> gradveil.Client:
    return gradveil.Client(nn.Linear(4, 3), defense="dp:sigma=2")


class Listed(Dataset[Any]):
    """The same kind of example at each of four places, or one after another of several."""

    def __init__(self, *examples: Any) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> Any:
        return self.examples[place % len(self.examples)]


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(INPUTS, TARGETS, strict=True))


class Unsized(Dataset[Any]):
    def __getitem__(self, place: int) -> Any:
        return DATA[place]


def picture() -> Any:
    return pytest.importorskip("PIL.Image").new("RGB", (4, 4))


MISUSED: dict[str, tuple[Any, str]] = {
    "three parts": (TensorDataset(INPUTS, TARGETS, TARGETS), "a pair of an input and a target, not a tuple of 3"),
    "one part": (TensorDataset(INPUTS), "a pair of an input and a target, not a tuple of 1"),
    "bare tensors": (INPUTS[:2], "a pair of an input and a target, not a Tensor: return such pairs"),
    "examples that are dicts": (Listed({"x": INPUTS[0], "y": 1}), "a pair of an input and a target, not a dict of 2"),
    "inputs that are dicts of texts": (Listed(({"x": "cat"}, 1)), "not dict and int"),
    "inputs that are dicts with other keys": (Listed(({"x": INPUTS[0]}, 1), ({"y": INPUTS[0]}, 1)), "of one size"),
    "inputs that are nested lists": (Listed(([[INPUTS[0]], INPUTS[1]], 1)), "not list and int"),
    "targets that are texts": (Listed((INPUTS[0], "cat")), "not Tensor and str"),
    "no target": (Listed((INPUTS[0], None)), "examples of Tensor and NoneType do not fit into one batch: make them"),
    "inputs of odd sizes": (Listed((torch.zeros(3), 1), (torch.zeros(4), 1)), "tensors or numbers, all of one size"),
    "a DataLoader": (DataLoader(DATA, batch_size=4), "give it the data set, loader.dataset, not a DataLoader"),
    "an IterableDataset": (Streamed(), "with a length and examples by number, .*, not Streamed"),
    "part of an IterableDataset": (
        Subset(Streamed(), [0, 1]),
        "with a length and examples by number, .*, not Streamed",
    ),
    "a data set without a length": (Unsized(), "with a length and examples by number, .*, not Unsized"),
    "a dict of data sets": ({"train": DATA}, "with a length and examples by number, .*, not dict"),
    "a generator": ((DATA[place] for place in range(40)), "with a length and examples by number, .*, not generator"),
    "nothing": (None, "with a length and examples by number, .*, not NoneType"),
    "no examples": (TensorDataset(INPUTS[:0], TARGETS[:0]), "needs examples"),
    "a Subset of nothing": (Subset(DATA, []), "needs examples"),
}


def refused(line: str, dataset: Any, rate: Any = 1.0, steps: Any = 1) -> None:
    with pytest.raises(GradveilError, match=line) as caught:
        list(client().sample(dataset, rate, steps))
    assert re.fullmatch(r"[^\n]{20,250}", str(caught.value))


@pytest.mark.parametrize("kind", MISUSED)
def test_what_is_no_data_set_of_pairs_is_refused(kind: str) -> None:
    dataset, line = MISUSED[kind]
    refused(line, dataset)


def test_pictures_are_refused() -> None:
    refused("examples of Image and int do not fit into one batch: make them tensors", Listed((picture(), 1)))


@pytest.mark.parametrize("rate", ["0.5", None, True, torch.tensor([0.5, 0.5]), 0, 1.5, float("nan"), 1j])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    refused("the rate is a number above 0 and at most 1", DATA, rate)


@pytest.mark.parametrize("steps", [2.0, "2", -1, torch.ones(2)])
def test_steps_that_are_no_number_of_batches_are_refused(steps: Any) -> None:
    refused("steps is the number of batches, a whole number, not", DATA, 0.5, steps)


def test_arguments_are_checked_before_the_first_batch_is_asked_for() -> None:
    with pytest.raises(GradveilError, match="rate"):
        client().sample(DATA, 2.0)


def test_numbers_of_numpy_lists_and_tiny_rates_are_fine() -> None:
    assert len(list(map(len, client_steps([(x, 1) for x in INPUTS], np.float32(0.5), np.int64(3))))) == 3
    next(client().sample(DATA, 5e-324))


def client_steps(dataset: Any, rate: Any, steps: Any) -> Iterator[Any]:
    trained = client()
    for inputs, targets in trained.sample(dataset, rate, steps):
        trained.step(inputs, targets)
        yield inputs


def test_a_loop_that_is_still_open_is_named() -> None:
    trained = client()
    batches = trained.sample(DATA, 0.5, 4)
    trained.step(*next(batches))
    with pytest.raises(GradveilError, match=r"^a loop over sample is still open.* finish or close\(\) it .*$"):
        trained.step(INPUTS, TARGETS)
    batches.close()  # type: ignore[attr-defined]
    trained.step(INPUTS, TARGETS)
    assert trained.log.ledger.state() == [[2.0, 0.5, 1], [2.0, 1.0, 1]]


REPEATED: dict[str, Any] = {
    "indices": Subset(DATA, [0] * 50 + list(range(40))),
    "indices from the end": Subset(DATA, [39, -1]),
    "indices as a tensor": Subset(DATA, torch.tensor([3, 4, 3])),  # type: ignore[arg-type]
    "indices below": Subset(Subset(DATA, [0, 0, 1]), [0, 1, 2]),
    "indices above": Subset(Subset(DATA, [0, 1]), [1, 1]),
    "a data set": ConcatDataset([DATA, DATA]),
    "a data set in another": ConcatDataset([ConcatDataset([DATA]), Subset(DATA, [7])]),
    "a part": ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, [2, 3])]),
    "indices of one of two": Subset(ConcatDataset([DATA, TensorDataset(INPUTS[:1], TARGETS[:1])]), [40, 40]),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_an_example_that_is_there_twice_is_refused(kind: str) -> None:
    """At the price of one draw it would have several times the influence."""
    refused("holds an example several times .* give each example once", REPEATED[kind])


def test_parts_that_share_no_example_are_fine() -> None:
    other = TensorDataset(INPUTS[:5], TARGETS[:5])
    parts = random_split(DATA, [10, 30])
    dataset: Any
    for dataset in (
        ConcatDataset([DATA, other, TensorDataset(INPUTS, TARGETS)]),
        ConcatDataset([other, DATA]),
        ConcatDataset(parts),
        Subset(parts[0], range(5)),
        Subset(Subset(DATA, [0, 0, 1]), [1, 2]),
    ):
        assert [len(inputs) for inputs in client_steps(dataset, 1.0, 1)] == [len(dataset)]
