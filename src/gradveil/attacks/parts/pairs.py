"""Pairs of public examples and defended updates: the known defense, as a black box, run on public data."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradveil.attacks.parts.candidate_updates import group_size, groups, updates_for
from gradveil.attacks.parts.cost import CostMeter
from gradveil.client import SimulatedClient, replies_in_round
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import stack
from gradveil.core.types import Batch, Params
from gradveil.data import ImageSet
from gradveil.defenses import Chain, Defense
from gradveil.engine import without_tf32
from gradveil.threat.observation import Observation

ENTRIES = 2**13
"""So many entries of an update are looked at; of a smaller one all."""
LEAST = 64
"""Of each tensor at least so many, or all."""
TINY = 1e-30
TRIED = 4
"""Replies whose cost is counted."""
FASTEST = 12_000
SLOWEST = 1_000
"""Pairs at most and at least, where the cost of the defense decides."""
SECONDS = 25.0
"""That the replies may take then, as ``CostMeter`` counts them."""
SHIFT = 2
"""Pixels by which an image that is used again is moved, at most."""


class Reader:
    """Reads the same numbers off every update: some entries, and statistics of each whole tensor."""

    def __init__(self, like: Params, entries: int = ENTRIES) -> None:
        share, rng = entries / sum(tensor.numel() for tensor in like.values()), generator(0, "learned entries")
        self._places = {}
        for name, tensor in sorted(like.items()):
            count = min(tensor.numel(), max(LEAST, round(share * tensor.numel())))
            places = torch.randperm(tensor.numel(), generator=rng)[:count].sort().values
            self._places[name] = places.to(tensor.device)

    def __call__(self, updates: Params) -> tuple[Tensor, Tensor]:
        """Of updates [n, ...]: entries [n, F], each tensor in units of its own length, and statistics [n, S].

        The statistics of a tensor are its length, its largest entry, its sum and the sum of its absolute entries, as
        logarithms but for the sum, which is a share of the length.
        """
        entries, statistics = [], []
        for name, places in self._places.items():
            flat = updates[name].unsqueeze(-1).flatten(1).float()  # a parameter may be a single number
            length = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
            size = flat.shape[1] ** 0.5
            entries.append(flat[:, places] / (length + TINY) * size)
            sizes = torch.cat([length, flat.abs().amax(1, keepdim=True), flat.abs().sum(1, keepdim=True)], dim=1)
            statistics += [(sizes + TINY).log(), flat.sum(1, keepdim=True) / (length + TINY) / size]
        return torch.cat(entries, dim=1).cpu(), torch.cat(statistics, dim=1).cpu()


@dataclass(frozen=True)
class Pairs:
    """Public examples, ``size`` of them behind each update, and what was read off the update."""

    inputs: Tensor
    """[n, size, ...]."""
    labels: Tensor
    """[n, size]."""
    entries: Tensor
    """[n, F]."""
    statistics: Tensor
    """[n, S]."""


class DefendedClients:
    """Clients with the known defense, each as if it were the first that the defense serves."""

    def __init__(self, one: Observation, size: int) -> None:
        links = [link for _, link in one.known_links()]
        built = [link for link in links if link is not None]
        if len(built) < len(links) or one.recipe is None:
            raise GradveilError(
                f"defense {one.defense!r} is a name alone here, and cannot be run: give the object itself"
            )
        self._one, self._size, self._recipe, self._defense = one, size, one.recipe, Chain(copy.deepcopy(built))
        self._client = SimulatedClient(one.module, recipe=one.recipe, defense=self._defense, loss=one.loss)
        # Where the update is one gradient, and that is the mean of those of single examples, many are computed at once.
        forward = all(type(link).on_forward is Defense.on_forward for link in built)
        self._together = forward and one.recipe.sends == "gradient" and (size == 1 or not one.recipe.train_mode)
        self._updates = updates_for(one)

    def replies(self, inputs: Tensor, labels: Tensor, first: int) -> Params:
        """Of batches [n, size, ...] and [n, size], what each client sends, [n, ...]; draws go by their numbers."""
        inputs, labels = inputs.clone(), labels.clone()  # a defense may edit what it gets
        if self._one.round_number > 1:
            batches = [Batch(*each) for each in zip(inputs, labels, strict=True)]
            streams = [partial(Stream.seeded, 0, "learned", first + place) for place in range(len(batches))]
            replies = replies_in_round(self._client, self._one.sent, batches, streams, self._one.round_number)
            return stack([reply.update for reply in replies])
        runs = []
        for place in range(len(inputs)):
            self._client.defense = copy.deepcopy(self._defense)  # it may remember what it was used for
            rng = Stream.seeded(0, "learned", first + place)
            runs.append(self._client.start(self._one.sent, Batch(inputs[place], labels[place]), rng))
        if not self._together:
            return stack([run.finish().update for run in runs])
        with torch.no_grad(), without_tf32():
            changed, wanted = (torch.cat([getattr(run, kind) for run in runs]) for kind in ("inputs", "targets"))
            each = self._updates(changed, wanted)
            means = {name: own.view(len(runs), self._size, *own.shape[1:]).mean(dim=1) for name, own in each.items()}
        for place, run in enumerate(runs):
            run.take(({name: own[place] for name, own in means.items()}, None))
        return stack([run.reply().update for run in runs])


def make_pairs(one: Observation, public: ImageSet, size: int, count: int | None, progress: Progress = SILENT) -> Pairs:
    """Pairs of public batches and what clients with the known defense send about them.

    Args:
        one: the broadcast, the recipe and the defense.
        public: where the examples come from. One that is used again is moved and mirrored.
        size: examples behind an update.
        count: how many pairs; None: as many as the defense should make in ``SECONDS``, halved as often as it takes.
        progress: where it reports how far it is.
    """
    clients, read, device = DefendedClients(one, size), Reader(one.reply), next(iter(one.sent.values())).device
    rng = generator(0, "learned pairs")
    if count is None:
        count = FASTEST
        batch = _drawn(public, TRIED * size, one.domain.classes, rng).to(device)
        clients.replies(*_cut(batch, size), first=-TRIED)  # not counted: some things are made once and kept
        with CostMeter() as cost:
            clients.replies(*_cut(batch, size), first=-TRIED)
        while count > SLOWEST and count * cost.seconds / TRIED > SECONDS:
            count = max(SLOWEST, count // 2)
    batch = _drawn(public, count * size, one.domain.classes, rng)
    inputs, labels = _cut(batch, size)
    entries, statistics = [], []
    with progress.task("learned: running the defense", count) as task:
        for group in groups(count, max(1, group_size(one.sent) // size)):
            sent = clients.replies(inputs[group].to(device), labels[group].to(device), first=group.start)
            own = read(sent)
            entries.append(own[0])
            statistics.append(own[1])
            task.advance(group.stop - group.start)
    return Pairs(inputs, labels, torch.cat(entries), torch.cat(statistics))


def _cut(batch: Batch, size: int) -> tuple[Tensor, Tensor]:
    inputs, labels = (tensor.view(-1, size, *tensor.shape[1:]) for tensor in (batch.inputs, batch.labels))
    return inputs, labels


def _drawn(public: ImageSet, count: int, classes: int, rng: torch.Generator) -> Batch:
    """Public examples in random order. After the last, all come again, moved a little and mirrored."""
    orders = [torch.randperm(len(public), generator=rng) for _ in range(-(-count // len(public)))]
    batch = public.batch(torch.cat(orders)[:count])
    inputs, labels = batch.inputs.to(torch.get_default_dtype()), batch.labels
    for start in range(len(public), count, len(public)):
        again = inputs[start : start + len(public)]
        again = again.flip(-1) if start // len(public) % 2 else again
        moves = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=rng).tolist()
        inputs[start : start + len(public)] = again.roll(moves, dims=(-2, -1))
    if len(public.class_names) != classes or int(labels.min()) < 0:  # labelled for another task, or not at all
        labels = torch.randint(classes, labels.shape, generator=rng)
    return Batch(inputs, labels)
