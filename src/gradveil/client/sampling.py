"""Poisson sampling: each example is in a batch with the same probability, independently of all others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import default_collate

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream


class Examples(Protocol):
    """A data set: an input and a target at each place from 0 on, as torch's data sets of that kind are."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


class Draws:
    """The batches that a guard draws, and whether each of them was stepped on once.

    Amplification by sampling holds only while nobody knows the draws: ``rng`` is a secret stream.
    """

    def __init__(self, rng: Stream) -> None:
        self._rng = rng
        self._rate: float | None = None
        self._expected: float | None = None
        self._size: int | None = None
        """Of the batch that was drawn last; None: no batch is out; -1: there was a step on it."""

    def batches(self, dataset: Examples, rate: float, steps: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets, collated as a DataLoader does it. Batches differ in size and may be empty.

        Args:
            dataset: the examples.
            rate: the probability that an example is in a batch.
            steps: the number of batches; default: as many as one pass over the data takes on average.
        """
        size = len(dataset)
        if not 0 < rate <= 1 or size == 0:
            raise GradveilError(f"sampling needs examples and a rate above 0 and at most 1, not {size} and {rate}")
        try:
            for _ in range(math.ceil(1 / rate) if steps is None else steps):
                if self._size not in (None, -1):
                    raise GradveilError(
                        "a batch of guard.sample had no step: take one on each batch, on empty ones too"
                    )
                drawn = self._rng.words(size) & (2**62 - 1)
                chosen = (drawn < int(rate * 2**62)).nonzero().flatten().tolist()
                inputs, targets = default_collate([dataset[place] for place in chosen or [0]])
                self._rate, self._expected, self._size = rate, rate * size, len(chosen)
                yield inputs[: len(chosen)], targets[: len(chosen)]
        finally:
            self._rate = self._expected = self._size = None

    def check(self, count: int) -> tuple[float | None, float | None]:
        """The rate and the expected size of the batch that these examples are; None where they were not drawn here."""
        if self._size not in (None, count):
            raise GradveilError(
                f"guard.sample drew {self._size} examples and {count} went backward: take one step on each batch"
            )
        return self._rate, self._expected

    def use(self) -> None:
        """A step was taken on the batch: a second one would be no new draw."""
        self._size = None if self._size is None else -1
