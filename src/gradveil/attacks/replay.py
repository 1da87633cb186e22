"""Replay: run the known defense itself on every candidate, and see whose replies are like the one that was seen.

Nothing has to be known of how the defense works: it is a black box that the adversary can run. What it does to an
update is learnt from its own replies about candidates, in several ways:

- *by draws*: each tensor of a candidate's reply has a mean and a spread, as they are or for the direction and the
  length apart;
- *by entries*: what becomes of an entry depends on the entry that the client had, in a way that is the same for all
  candidates: its mean and its spread are read from all of them. The entry may count as it is, or in units of its update
  or of its tensor.

Which way fits is tried out: a reply of each candidate is kept back, and the way counts that names most of them. The
truth has no part in that. A defense that draws nothing needs one reply of each candidate, and the distance to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack, Reconstruction
from gradveil.attacks.identify import RandomChoice, candidates_of, chosen
from gradveil.attacks.parts.candidate_updates import group_size, groups, updates_for
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import stack
from gradveil.core.types import Params
from gradveil.data import ImageSet
from gradveil.defenses import Chain
from gradveil.engine import without_tf32
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

ENTRIES = 2**15
"""So many entries of an update are compared; of a smaller one all."""
LEAST = 64
"""Of each tensor at least so many, or all."""
BINS = 64
"""Into so many parts the entries of a tensor are sorted by size, to read what becomes of each part."""
ROUNDING = 1e-4
"""How far, as a share, two numbers may differ that are meant to be equal: rounding, other kernels."""
TINY = 1e-30
FEW = 3
"""Of so many candidates two replies are compared, to see whether the defense draws random numbers."""
FEWER_ENTRIES = 2**12
"""The same for batches, of which many sets are tried."""
SETS, KEPT = 120, 8
"""Batches of candidates that the defense is run on, to learn what it does; and how many of them try out ways."""
STARTS, LONGEST = 4, 60
"""Sets that a search begins with, and exchanges of a member at most."""


@dataclass(frozen=True)
class Sketch:
    """Some entries of each tensor of updates, [..., entries] by name, and the length of each whole tensor, [...]."""

    entries: Params
    lengths: Params

    def take(self, where: Tensor | slice | tuple[slice, slice | int]) -> Sketch:
        return Sketch(*({name: part[where] for name, part in tree.items()} for tree in (self.entries, self.lengths)))


Unit = Literal["one", "update", "tensor"]
Way = Callable[[Sketch, Sketch, Sketch], Tensor]
"""(N replies, n draws of m candidates [m, n], their updates without a defense [m]) -> how badly each fits, [N, m]."""


class Sketcher:
    """The same entries of every update, drawn once."""

    def __init__(self, like: Params, entries: int) -> None:
        share = entries / sum(tensor.numel() for tensor in like.values())
        rng = generator(0, "replay")
        self._places = {}
        for name, tensor in sorted(like.items()):
            count = min(tensor.numel(), max(LEAST, round(share * tensor.numel())))
            places = torch.randperm(tensor.numel(), generator=rng)[:count]
            self._places[name] = places.sort().values.to(tensor.device)

    def __call__(self, updates: Params) -> Sketch:
        """Of updates [n, ...] by name."""
        flat = {name: updates[name].flatten(1).double() for name in self._places}
        entries = {name: flat[name][:, places].cpu() for name, places in self._places.items()}
        return Sketch(entries, {name: tensor.norm(dim=1).cpu() for name, tensor in flat.items()})


def _by_distance(seen: Sketch, draws: Sketch, plain: Sketch) -> Tensor:  # noqa: ARG001
    """Of a defense that draws nothing: squared distances, each tensor in units of its own length."""
    total = torch.zeros(())
    for name, own in seen.entries.items():
        away = torch.cdist(own, draws.entries[name][:, 0], compute_mode="donot_use_mm_for_euclid_dist").square()
        total = total + away / (own.square().sum(dim=1, keepdim=True) + TINY)
    return total


def _by_draws(seen: Sketch, draws: Sketch, plain: Sketch, *, apart: bool) -> Tensor:  # noqa: ARG001
    """A Gaussian for each tensor of each candidate, with one spread for all its entries; lengths ``apart`` or not."""
    total = torch.zeros(())
    for name, own in seen.entries.items():
        each, count = draws.entries[name], draws.entries[name].shape[1]
        if apart:
            length, lengths = ((tree.lengths[name] + TINY).log() for tree in (seen, draws))
            varies = lengths.var(dim=1) * (1 + 1 / count) + ROUNDING**2
            total = total + (length[:, None] - lengths.mean(dim=1)).square() / varies + varies.log()
            own, each = (part / (part.norm(dim=-1, keepdim=True) + TINY) for part in (own, each))
        mean, size = each.mean(dim=1), own.shape[1]
        spread = (each - mean[:, None]).square().sum(dim=(1, 2)) / ((count - 1) * size)
        variance = spread + ROUNDING**2 * each.square().mean(dim=(1, 2)) + TINY
        # what the mean of a few draws is off adds to its distance from everybody, by its own spread
        away = own.square().sum(dim=1)[:, None] - 2 * own @ mean.T + mean.square().sum(dim=1) - spread * size / count
        total = total + away / variance + size * variance.log()
    return total


@dataclass(frozen=True)
class EntryModel:
    """What becomes of an entry, by the entry that there was without the defense: a line and a spread for each range."""

    unit: Unit
    tensors: dict[str, tuple[Tensor, ...]]
    """By name: edges of the ranges; then, for each of them, middle before and after, slope and spread."""

    @classmethod
    def fitted(cls, draws: Sketch, plain: Sketch, unit: Unit) -> EntryModel:
        tensors: dict[str, tuple[Tensor, ...]] = {}
        for name, before in plain.entries.items():
            units = _units(plain, name, unit)
            x, y = before / units, draws.entries[name] / units[:, None]
            some = x.flatten()[:: max(1, x.numel() // 100_000)]
            edges = torch.unique(torch.quantile(some, torch.linspace(0, 1, BINS + 1, dtype=x.dtype)[1:-1]))
            sent = draws.lengths[name] > 0  # a defense may leave out whole tensors, at random
            ranges = torch.bucketize(x, edges)[:, None].expand_as(y)[sent].flatten()
            xs, ys, count = x[:, None].expand_as(y)[sent].flatten(), y[sent].flatten(), len(edges) + 1
            number = torch.bincount(ranges, minlength=count).clamp(min=1)
            mean_x, mean_y, squares_x, squares_y, products = (
                torch.zeros(count, dtype=x.dtype).index_add_(0, ranges, values) / number
                for values in (xs, ys, xs * xs, ys * ys, xs * ys)
            )
            varies, along = squares_x - mean_x**2, products - mean_x * mean_y
            slope = torch.where(varies > 1e-12 * mean_x**2 + TINY, along / varies.clamp(min=TINY), 0.0)
            spread = (squares_y - mean_y**2 - slope * along).clamp(min=0)
            spread = spread + ROUNDING**2 * (ys.square().sum() / max(1, len(ys))) + TINY
            tensors[name] = edges, mean_x, mean_y, slope, spread
        return cls(unit, tensors)

    def scores(self, seen: Sketch, plain: Sketch, often: Params) -> Tensor:
        """[N, m]: how badly updates without a defense, [m], explain replies, [N]; ``often`` [m] each tensor is sent."""
        total = torch.zeros(())
        for name, (edges, mean_x, mean_y, slope, spread) in self.tensors.items():
            own, units = seen.entries[name], _units(plain, name, self.unit)
            x = plain.entries[name] / units
            part = torch.bucketize(x, edges)
            expected, variance = (mean_y[part] + slope[part] * (x - mean_x[part])) * units, spread[part] * units**2
            away = own.square() @ (1 / variance).T - 2 * own @ (expected / variance).T
            away = away + (expected.square() / variance + variance.log()).sum(dim=1)
            missing = (seen.lengths[name] == 0)[:, None]
            total = total + torch.where(missing, -2 * (1 - often[name]).log(), away - 2 * often[name].log())
        return total


def _units(plain: Sketch, name: str, unit: Unit) -> Tensor:
    """[m, 1]: what an entry of each update is measured in."""
    if unit == "tensor":
        length: Tensor = plain.entries[name].norm(dim=1, keepdim=True)
        return length + TINY
    whole: Tensor = torch.stack([own.square().sum(dim=1) for own in plain.entries.values()]).sum(dim=0).sqrt()[:, None]
    return whole + TINY if unit == "update" else torch.ones_like(whole)


def _by_entries(seen: Sketch, draws: Sketch, plain: Sketch, *, unit: Unit) -> Tensor:
    return EntryModel.fitted(draws, plain, unit).scores(seen, plain, _often(draws))


def _often(draws: Sketch) -> Params:
    """By name, [m]: the share of draws in which a tensor is sent; never quite none or all."""
    return {name: ((own > 0).sum(dim=1) + 0.5).double() / (own.shape[1] + 1) for name, own in draws.lengths.items()}


UNITS: tuple[Unit, ...] = ("one", "update", "tensor")
WAYS: dict[str, Way] = {
    "draws": partial(_by_draws, apart=False),
    "draws, lengths apart": partial(_by_draws, apart=True),
    **{f"entries by {unit}": partial(_by_entries, unit=unit) for unit in UNITS},
}


def _fitting(draws: Sketch, plain: Sketch) -> str:
    """The way that names most candidates by a reply of theirs that was kept back, in doubt the surest."""
    kept, rest = draws.take((slice(None), 0)), draws.take((slice(None), slice(1, None)))
    found = {}
    for name, way in WAYS.items():
        scores = way(kept, rest, plain)
        places = (scores <= scores.diagonal()[:, None]).sum(dim=1)
        found[name] = (float((places == 1).double().mean()), -float(places.double().log().mean()))
    return max(found, key=lambda name: found[name])


class BlackBox:
    """The defense as the adversary runs it: what a simulated client replies about candidates."""

    def __init__(
        self, client: SimulatedClient, one: Observation, known: ImageSet, entries: int, progress: Progress
    ) -> None:
        self._client, self._one, self._known, self._progress = client, one, known, progress
        self._device = next(iter(one.sent.values())).device
        self.sketch = Sketcher(one.reply, entries)

    def plain(self) -> Sketch:
        """[m]: the update of each candidate without a defense."""
        updates, parts = updates_for(self._one), []
        with torch.no_grad(), without_tf32():
            for group in groups(len(self._known), group_size(self._one.sent)):
                batch = self._known.batch(range(group.start, group.stop)).to(self._device)
                parts.append(self.sketch(updates(batch.inputs, batch.labels)))
        return _joined(parts)

    def draws(self, sets: Sequence[Sequence[int]], times: int) -> Sketch:
        """[sets, n]: replies about batches of candidates. A defense that draws nothing is asked once."""
        with self._progress.task("replay", times * len(sets)) as task, without_tf32():

            def replies(chosen: Sequence[Sequence[int]], time: int) -> Sketch:
                parts = []
                for number, places in enumerate(chosen):
                    batch = self._known.batch(list(places)).to(self._device)
                    reply = self._client.reply(self._one.sent, batch, Stream.seeded(0, "replay", time, number))
                    parts.append(self.sketch({name: tensor[None] for name, tensor in reply.update.items()}))
                    task.advance()
                return _joined(parts)

            few, again = (replies(sets[:FEW], time) for time in (0, 1))
            drawn = any(not torch.equal(own, again.entries[name]) for name, own in few.entries.items())
            each = [replies(sets, time) for time in range(times if drawn else 1)]
        trees = ([getattr(one, kind) for one in each] for kind in ("entries", "lengths"))
        return Sketch(*({name: torch.stack([one[name] for one in tree], dim=1) for name in tree[0]} for tree in trees))


def _joined(parts: Sequence[Sketch]) -> Sketch:
    trees = ([getattr(part, kind) for part in parts] for kind in ("entries", "lengths"))
    return Sketch(*({name: torch.cat([one[name] for one in tree]) for name in tree[0]} for tree in trees))


class SetSearch:
    """Which candidates together explain the reply about a batch, by what becomes of entries of their mean update."""

    def __init__(self, box: BlackBox, candidates: int, size: int) -> None:
        self.plain, self.size = box.plain(), size
        rng = generator(0, "replay sets")
        sets = torch.stack([torch.randperm(candidates, generator=rng)[:size] for _ in range(SETS)])
        draws = box.draws(sets.tolist(), 1)
        self.often = {name: own.mean(dim=0, keepdim=True) for name, own in _often(draws).items()}
        together, fitted = self._mean(sets), slice(KEPT, None)

        def sure(model: EntryModel) -> float:
            """How far before sets with one other member the sets that were kept back come."""
            self.model = model
            places = []
            for number, members in enumerate(sets[:KEPT]):
                scores = self._exchanged(draws.take((slice(number, number + 1), 0)), members)
                places.append(1 + int((scores < scores[0, members[0]]).sum()))
            return -sum(map(math.log, places))

        models = [EntryModel.fitted(draws.take(fitted), together.take(fitted), unit) for unit in UNITS]
        self.model = max(models, key=sure)

    def scores(self, reply: Sketch) -> Tensor:
        """[m]: how badly the best set explains one reply that each candidate belongs to."""
        products = torch.stack([reply.entries[name] @ own.T for name, own in self.plain.entries.items()]).sum(dim=0)
        squares = torch.stack([own.square().sum(dim=1) for own in self.plain.entries.values()]).sum(dim=0)
        rng = generator(0, "replay starts")
        count = products.shape[1]
        starts = [(products[0] / (squares + TINY).sqrt()).topk(self.size).indices]
        starts += [torch.randperm(count, generator=rng)[: self.size] for _ in range(STARTS - 1)]
        best = torch.full((count,), torch.inf, dtype=torch.float64)
        for start in starts:
            members, reached = start, torch.inf
            for _ in range(LONGEST):
                scores = self._exchanged(reply, members)
                best = torch.minimum(best, scores.amin(dim=0))
                least, place = scores.flatten().min(dim=0)
                if least >= reached - 1e-9 * abs(float(least)):
                    break
                reached, members = float(least), members.clone()
                members[place // count] = place % count
        return best

    def _exchanged(self, reply: Sketch, members: Tensor) -> Tensor:
        """[B, m]: the score of a set after each member was exchanged for each candidate; other members stay out."""
        found = []
        for place in range(self.size):
            rest = torch.cat([members[:place], members[place + 1 :]])
            trees = (
                {name: (own[rest].sum(dim=0) + own) / self.size for name, own in tree.items()}
                for tree in (self.plain.entries, self.plain.lengths)
            )
            found.append(self.model.scores(reply, Sketch(*trees), self.often)[0].index_fill(0, rest, torch.inf))
        return torch.stack(found)

    def _mean(self, sets: Tensor) -> Sketch:
        trees = (self.plain.entries, self.plain.lengths)
        return Sketch(*({name: own[sets].mean(dim=1) for name, own in tree.items()} for tree in trees))


@ATTACKS.register("replay")
@dataclass(frozen=True, kw_only=True)
class Replay(Attack):
    """Replay: run the known defense, whatever it is, on every candidate, and take who explains the reply best."""

    candidates: str | None = None
    """The spec of a data set to choose from, where it is not the one that the threat model grants."""
    draws: int = 5
    """How often the defense is run on each candidate, if it draws random numbers."""
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES, Knowledge.DEFENSE, Knowledge.RECIPE})

    def __post_init__(self) -> None:
        if self.draws < 3:
            raise GradveilError(
                f"attack replay: draws is at least 3, not {self.draws}: one is kept back to try out ways"
            )

    def kind_of(self, one: Observation) -> Hashable:
        return one.defense

    def prior_only(self) -> Attack | None:
        return RandomChoice(candidates=self.candidates)

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        one, known = seen[0], candidates_of(seen[0], self.candidates)
        links = [link for _, link in one.known_links()]
        built = [link for link in links if link is not None]
        if len(built) < len(links) or one.recipe is None:
            raise GradveilError(
                f"defense {one.defense!r} is a name alone here, and cannot be run: give the object itself"
            )
        client = SimulatedClient(one.module, recipe=one.recipe, defense=Chain(built), loss=one.loss)
        size = min(one.batch_size or 1, len(known))
        box = BlackBox(client, one, known, ENTRIES if size == 1 else FEWER_ENTRIES, progress)
        replies = box.sketch(stack([other.reply for other in seen]))
        if size > 1:
            search = SetSearch(box, len(known), size)
            way = f"sets, entries by {search.model.unit}"
            scores = torch.stack([search.scores(replies.take(slice(i, i + 1))) for i in range(len(seen))])
        else:
            draws, plain = box.draws([[place] for place in range(len(known))], self.draws), box.plain()
            repeats = next(iter(draws.lengths.values())).shape[1] == 1
            way = "distance" if repeats else _fitting(draws, plain)
            scores = (_by_distance if repeats else WAYS[way])(replies, draws, plain)
        found = []
        for own, seed in zip(scores, seeds, strict=True):
            found.append(chosen(known, own, known.labels, size, seed, f"replayed, compared by {way}"))
        return found
