"""Poisson sampling: each example is in a batch with the same probability, independently of all others."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, default_collate

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

    def batches(self, dataset: Examples, rate: float, steps: int | None) -> Iterator[tuple[Any, Tensor]]:
        """Inputs and targets, collated as a DataLoader does it. Batches differ in size and may be empty.

        Args:
            dataset: the examples.
            rate: the probability that an example is in a batch.
            steps: the number of batches; default: as many as one pass over the data takes on average.

        Raises:
            GradveilError: if these are no such arguments, or if the data set holds an example twice.
        """
        _check(dataset, rate, steps)
        rate = float(rate)
        return self._batches(dataset, rate, math.ceil(min(1 / rate, 2**62)) if steps is None else int(steps))

    def _batches(self, dataset: Examples, rate: float, steps: int) -> Iterator[tuple[Any, Tensor]]:
        size = len(dataset)
        try:
            for _ in range(steps):
                if self._size not in (None, -1):
                    raise GradveilError("a batch of sample had no step: take one on each batch, on empty ones too")
                drawn = self._rng.words(size) & (2**62 - 1)
                chosen = (drawn < int(rate * 2**62)).nonzero().flatten().tolist()
                inputs, targets = _collated([dataset[place] for place in chosen or [0]])
                self._rate, self._expected, self._size = rate, rate * size, len(chosen)
                drawn_ones = slice(len(chosen))
                yield tree_map(itemgetter(drawn_ones), inputs), targets[drawn_ones]
        finally:
            self._rate = self._expected = self._size = None

    def check(self, count: int) -> tuple[float | None, float | None]:
        """The rate and the expected size of the batch that these examples are; None where they were not drawn here."""
        if self._size == -1:
            raise GradveilError(
                "a loop over sample is still open, and its batch had its step: take the next batch from it, or finish "
                "or close() it before a step on other examples"
            )
        if self._size not in (None, count):
            raise GradveilError(
                f"sample drew {self._size} examples and {count} went backward: take one step on each batch, "
                "or close() the loop over sample"
            )
        return self._rate, self._expected

    def use(self) -> None:
        """A step was taken on the batch: a second one would be no new draw."""
        self._size = None if self._size is None else -1


def _check(dataset: object, rate: object, steps: object) -> None:
    """Raise, in one line that says what to do, if batches cannot be drawn."""
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not 0 < cast(float, rate) <= 1:
        shown = repr(rate) if isinstance(rate, numbers.Real) else f"a {type(rate).__name__}"
        raise GradveilError(
            f"the rate is a number above 0 and at most 1, the share of examples in a batch, not {shown}"
        )
    if steps is not None and (not isinstance(steps, numbers.Integral) or steps < 0):
        shown = repr(steps) if isinstance(steps, numbers.Real) else f"a {type(steps).__name__}"
        raise GradveilError(f"steps is the number of batches, a whole number, not {shown}")
    if isinstance(dataset, DataLoader):
        raise GradveilError("sample draws the batches itself: give it the data set, loader.dataset, not a DataLoader")
    places = _places(dataset, {})
    if len(places) == 0:
        raise GradveilError("sample needs examples, and this data set has none")
    if isinstance(dataset, Subset | ConcatDataset) and len(set(places.tolist())) < len(places):
        raise GradveilError(
            "the data set holds an example several times (repeated indices of a Subset, or one data set twice in a "
            "ConcatDataset), which would cost more privacy than is counted: give each example once"
        )


def _places(dataset: Any, known: dict[int, int]) -> Tensor:
    """[len]: a number for each example, the same where it is the same place of the same data set."""
    if isinstance(dataset, Subset):
        chosen = torch.tensor([int(place) for place in dataset.indices], dtype=torch.int64)
        unsized = not hasattr(type(dataset.dataset), "__len__") and hasattr(type(dataset.dataset), "__getitem__")
        if unsized and not isinstance(dataset.dataset, IterableDataset) and bool((chosen >= 0).all()):
            return chosen + known.setdefault(id(dataset.dataset), len(known)) * 2**40
        try:
            return _places(dataset.dataset, known)[chosen]
        except IndexError:
            raise GradveilError("a Subset has indices beyond the end of its data set") from None
    if isinstance(dataset, ConcatDataset):
        return torch.cat([_places(part, known) for part in dataset.datasets])
    numbered = hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")
    if isinstance(dataset, IterableDataset | Mapping | str) or not numbered:
        raise GradveilError(
            "sample needs a data set with a length and examples by number, such as a TensorDataset or a list of pairs, "
            f"not {type(dataset).__name__}"
        )
    return torch.arange(len(dataset)) + known.setdefault(id(dataset), len(known)) * 2**40


def _collated(examples: list[Any]) -> tuple[Any, Tensor]:
    """Inputs and targets side by side. No message quotes an example, which is private."""
    odd = next((one for one in examples if not isinstance(one, tuple | list) or len(one) != 2), None)
    if odd is not None:
        what = f"{type(odd).__name__} of {len(odd)}" if isinstance(odd, tuple | list | dict) else type(odd).__name__
        raise GradveilError(f"an example is a pair of an input and a target, not a {what}: return such pairs")
    try:
        inputs, targets = default_collate(examples)
    except (TypeError, RuntimeError, ValueError, KeyError) as error:
        kinds = " and ".join(type(part).__name__ for part in examples[0])
        raise GradveilError(
            f"examples of {kinds} do not fit into one batch: make them tensors or numbers, all of one size and type"
        ) from error
    parts = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    several = isinstance(parts, list | tuple) and len(parts) > 0 and all(isinstance(part, Tensor) for part in parts)
    if not (isinstance(inputs, Tensor) or several) or not isinstance(targets, Tensor):
        kinds = " and ".join(type(part).__name__ for part in examples[0])
        raise GradveilError(f"an example is one tensor or number as input and one as target, not {kinds}")
    return inputs, targets
