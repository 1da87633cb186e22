"""The update that each of many candidates would have caused by itself, a group of candidates at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.attacks.parts.labels import prediction_errors
from gradveil.client.local import local_update
from gradveil.core.seeding import generator
from gradveil.core.types import Params, Recipe
from gradveil.data import UNKNOWN, ImageSet
from gradveil.engine import shared_gradients, without_tf32
from gradveil.models import Functional
from gradveil.threat.observation import Observation

BYTES_AT_ONCE = {"cpu": 2**28, "cuda": 2**33}
"""Bytes that the updates of candidates may take together; one of them may take more."""
MOST = 250
"""Candidates in a group at most: activations take memory too."""
MOST_LABELS = 100
"""Of so many classes each is tried for a candidate whose label is not known; of more, those that the updates show."""

Updates = Callable[[Tensor, Tensor], Params]
"""(inputs [c, ...], labels [c]) -> the update of each candidate alone, [c, ...] by name."""


def group_size(sent: Params) -> int:
    """How many candidates' updates are held at a time."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
    room = BYTES_AT_ONCE["cuda" if next(iter(sent.values())).is_cuda else "cpu"]
    return max(1, min(MOST, room // size))


def groups(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def updates_for(one: Observation) -> Updates:
    """What a client without a defense would have sent for each of some candidates, from this broadcast on.

    One pass of a batch through the shared weights serves all candidates where the update is one gradient and the
    model's layers allow that; elsewhere every candidate runs the local steps on weights of its own.
    """
    recipe = one.recipe or Recipe(sends=one.kind)
    found = None
    if recipe.sends == "gradient":
        found = shared_gradients(
            one.module, one.sent, one.loss,
            train_mode=recipe.train_mode, shape=one.domain.shape, classes=one.domain.classes,
        )  # fmt: skip
    return found or _each_alone(one, recipe)


def _each_alone(one: Observation, recipe: Recipe) -> Updates:
    model = Functional(one.module, train_mode=recipe.train_mode)

    def alone(inputs: Tensor, label: Tensor) -> Params:
        return local_update(model, one.loss, one.sent, inputs.unsqueeze(0), label.unsqueeze(0), recipe)

    def updates(inputs: Tensor, labels: Tensor) -> Params:
        with without_tf32():
            return vmap(alone)(inputs, labels)

    return updates


@dataclass(frozen=True)
class LabelledCandidates:
    """A list of candidates to compute updates of: one whose label is not known stands in it with every label tried."""

    entries: ImageSet
    """Each with a label."""
    owners: Tensor
    """[entries]: which candidate of the list each is."""
    candidates: int

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Of scores [N, entries]: the lowest of each candidate, [N, candidates], and the label it was reached with."""
        if len(self.owners) == self.candidates:
            return scores, self.entries.labels.expand(len(scores), -1)
        owners, shape = self.owners.expand(len(scores), -1), (len(scores), self.candidates)
        scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        lowest = torch.full(shape, torch.inf, dtype=scores.dtype).scatter_reduce(1, owners, scores, "amin")
        reached = torch.where(scores == lowest.gather(1, owners), self.entries.labels, len(self.entries.class_names))
        labels = torch.full(shape, len(self.entries.class_names)).scatter_reduce(1, owners, reached, "amin")
        return lowest, labels


def with_labels(known: ImageSet, seen: Sequence[Observation]) -> LabelledCandidates:
    """The candidates with labels to try: their own or, where it is not known, every one that the updates allow.

    Those are the labels that were granted, or all classes. Of more than ``MOST_LABELS`` they are the ones that the
    last layer's gradients point at most. Every candidate is tried with all of them, private or not.
    """
    one, unknown = seen[0], known.labels == UNKNOWN
    if not unknown.any():
        return LabelledCandidates(known, torch.arange(len(known)), len(known))
    granted = [other.labels.cpu() for other in seen if other.labels is not None]
    if len(granted) == len(seen):
        allowed = torch.unique(torch.cat(granted))
    elif one.domain.classes <= MOST_LABELS:
        allowed = torch.arange(one.domain.classes)
    else:
        each = max(2, MOST_LABELS // len(seen))
        allowed = torch.unique(prediction_errors(seen).argsort(dim=1)[:, :each].cpu())
    owners = torch.arange(len(known)).repeat_interleave(torch.where(unknown, len(allowed), 1))
    tried = allowed.repeat(int(unknown.sum()))
    labels = known.labels[owners].masked_scatter(unknown[owners], tried)
    return LabelledCandidates(replace(known.subset(owners), labels=labels), owners, len(known))


def best_first(scores: Tensor, seed: int) -> Tensor:
    """Candidates [m] from the lowest score to the highest. Equal ones stand as the seed decides, not as in the list."""
    drawn = torch.randperm(len(scores), generator=generator(seed, "equal scores"))
    return drawn[scores.cpu()[drawn].argsort(stable=True)]
