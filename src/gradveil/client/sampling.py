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


def poisson_batches(
    dataset: Examples, rate: float, steps: int | None, rng: Stream
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """The size of each batch, and its inputs and targets, collated as a DataLoader does it.

    Args:
        dataset: the examples.
        rate: the probability that an example is in a batch.
        steps: the number of batches; default: as many as one pass over the data takes on average.
        rng: draws who is in a batch. Amplification by sampling holds only while nobody knows these draws.
    """
    size = len(dataset)
    if not 0 < rate <= 1 or size == 0:
        raise GradveilError(f"sampling needs examples and a rate above 0 and at most 1, not {size} and {rate}")
    for _ in range(math.ceil(1 / rate) if steps is None else steps):
        drawn = rng.words(size) & (2**62 - 1)
        chosen = (drawn < int(rate * 2**62)).nonzero().flatten().tolist()
        inputs, targets = default_collate([dataset[place] for place in chosen or [0]])
        yield len(chosen), (inputs[: len(chosen)], targets[: len(chosen)])
