"""Replay: run the known defense itself on every candidate, and see whose replies are like the one that was seen.

Nothing has to be known of how the defense works: it is a black box that the adversary can run. What it does to an
update is learnt from its own replies about candidates, in several ways:

- *by draws*: each tensor of a candidate's reply has a mean and a spread, as they are or for the direction and the
  length apart;
- *by entries*: what becomes of an entry depends on the entry that the client had, in a way that is the same for all
  candidates: its mean and its spread are read from all of them. The entry may count as it is, or in units of its update
  or of its tensor;
- *by lengths*: the same for the length of each tensor.

Which way fits is tried out: a reply of each candidate is kept back, and the way counts that names most of them. The
truth has no part in that. A defense that draws nothing needs one reply of each candidate, and the distance to it. Of
noise on a gradient, clipped or not, the likelihood is known exactly, and nothing has to be run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack, Reconstruction
from gradveil.attacks.identify import Identify, RandomChoice, candidates_of, chosen
from gradveil.attacks.parts.candidate_updates import group_size, groups, updates_for, with_labels
from gradveil.client import SimulatedClient, replies_in_round
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import stack
from gradveil.core.types import Params
from gradveil.data import ImageSet
from gradveil.defenses import DP, Chain, Clip, ClipExamples, Defense, Noise, PublicData
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
EXACT = (Noise, Clip, ClipExamples, DP)
"""Defenses through which the likelihood of a gradient is known exactly."""
LONG, SHORT = 300, 30
"""A list with more entries is long: what a random defense does is learnt from so many of them, and the others are
ranked by it without a reply of theirs. Where replies do better, the best few of each list are run."""
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


def _by_distance(seen: Sketch, replies: Sketch) -> Tensor:
    """[N, m]: squared distances to one reply of each candidate, each tensor in units of its own length."""
    total = torch.zeros(())
    for name, own in seen.entries.items():
        away = torch.cdist(own, replies.entries[name], compute_mode="donot_use_mm_for_euclid_dist").square()
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


@dataclass(frozen=True)
class LengthModel:
    """What becomes of the length of each tensor, by its length without the defense: a line through their logarithms."""

    lines: dict[str, tuple[Tensor, ...]]
    """By name: middle before and after, slope and spread."""

    @classmethod
    def fitted(cls, draws: Sketch, plain: Sketch) -> LengthModel:
        lines: dict[str, tuple[Tensor, ...]] = {}
        for name, own in draws.lengths.items():
            y, x = (own + TINY).log(), (plain.lengths[name] + TINY).log()[:, None].expand_as(own)
            along, varies = ((x - x.mean()) * (y - y.mean())).mean(), x.var(correction=0)
            slope = along / varies if varies > TINY else torch.zeros_like(along)
            spread = (y.var(correction=0) - slope * along).clamp(min=0) + ROUNDING**2
            lines[name] = x.mean(), y.mean(), slope, spread
        return cls(lines)

    def scores(self, seen: Sketch, plain: Sketch) -> Tensor:
        """[N, m]: how badly the lengths of updates without a defense, [m], explain those of replies, [N]."""
        total = torch.zeros(())
        for name, (mean_x, mean_y, slope, spread) in self.lines.items():
            expected = mean_y + slope * ((plain.lengths[name] + TINY).log() - mean_x)
            total = total + ((seen.lengths[name] + TINY).log()[:, None] - expected).square() / spread
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


def _by_lengths(seen: Sketch, draws: Sketch, plain: Sketch) -> Tensor:
    return LengthModel.fitted(draws, plain).scores(seen, plain)


def _often(draws: Sketch) -> Params:
    """By name, [m]: the share of draws in which a tensor is sent; never quite none or all."""
    return {name: ((own > 0).sum(dim=1) + 0.5).double() / (own.shape[1] + 1) for name, own in draws.lengths.items()}


UNITS: tuple[Unit, ...] = ("one", "update", "tensor")
WAYS: dict[str, Way] = {
    "draws": partial(_by_draws, apart=False),
    "draws, lengths apart": partial(_by_draws, apart=True),
    **{f"entries by {unit}": partial(_by_entries, unit=unit) for unit in UNITS},
    "lengths": _by_lengths,
}
LEARNT = tuple(name for name in WAYS if not name.startswith("draws"))
"""Ways that rank a candidate without a reply of its own."""


def _fitting(draws: Sketch, plain: Sketch, ways: Sequence[str] = tuple(WAYS)) -> str:
    """The way that names most candidates by a reply of theirs that was kept back, in doubt the surest."""
    kept, rest = draws.take((slice(None), 0)), draws.take((slice(None), slice(1, None)))
    found = {}
    for name in ways:
        way = WAYS[name]
        scores = way(kept, rest, plain)
        places = (scores <= scores.diagonal()[:, None]).sum(dim=1)
        found[name] = (float((places == 1).double().mean()), -float(places.double().log().mean()))
    return max(found, key=lambda name: found[name])


class BlackBox:
    """The defense as the adversary runs it: what a simulated client replies about candidates.

    A client answers all rounds up to the one that was seen, with the same candidate: a memory is of its own data.
    """

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

    def replies(self, sets: Sequence[Sequence[int]], time: int) -> Sketch:
        """[sets]: one reply about each batch of candidates; other ``time``, other draws."""
        parts = []
        with self._progress.task("replay", len(sets)) as task, without_tf32():
            for group in groups(len(sets), self._together):
                batches = [self._known.batch(list(places)).to(self._device) for places in sets[group]]
                # to the defense, the examples of its own client are private and all others are public
                self._client.public = PublicData(torch.cat([batch.inputs for batch in batches]))
                streams = [partial(Stream.seeded, 0, "replay", time, *places) for places in sets[group]]
                found = replies_in_round(self._client, self._one.sent, batches, streams, self._one.round_number)
                parts.append(self.sketch(stack([reply.update for reply in found])))
                task.advance(len(batches))
        return _joined(parts)

    @property
    def _together(self) -> int:
        return group_size(self._one.sent) if self._client.defense.batches_clients else 1

    def is_random(self, sets: Sequence[Sequence[int]]) -> bool:
        """Whether two replies about the same candidates differ."""
        few, again = (self.replies(sets[:FEW], time) for time in (0, 1))
        return any(not torch.equal(own, again.entries[name]) for name, own in few.entries.items())

    def draws(self, sets: Sequence[Sequence[int]], times: int) -> Sketch:
        """[sets, times]: several replies about batches of candidates."""
        each = [self.replies(sets, time) for time in range(times)]
        trees = ([getattr(one, kind) for one in each] for kind in ("entries", "lengths"))
        return Sketch(*({name: torch.stack([one[name] for one in tree], dim=1) for name in tree[0]} for tree in trees))

    def distances(self, seen: Sketch) -> Tensor:
        """[N, m]: how far each candidate's reply is from what was seen, of a defense that draws nothing."""
        places = [[place] for place in range(len(self._known))]
        parts = [_by_distance(seen, self.replies(places[group], 0)) for group in groups(len(places), LONG)]
        return torch.cat(parts, dim=1)

    def likelihoods(self, seen: Sketch, times: int) -> tuple[Tensor, str]:
        """[N, m]: how badly each candidate explains what was seen, of a defense that draws, and the way they compare.

        In a long list, those that come first by what was learnt from some candidates are run, if that does better.
        """
        plain, count = self.plain(), len(self._known)
        if count <= LONG:
            draws = self.draws([[place] for place in range(count)], times)
            way = _fitting(draws, plain)
            return WAYS[way](seen, draws, plain), way
        some = torch.randperm(count, generator=generator(0, "replay some"))[:LONG].sort().values
        draws, few = self.draws([[place] for place in some.tolist()], times), plain.take(some)
        way, cheap = _fitting(draws, few), _fitting(draws, few, LEARNT)
        scores = _learnt(cheap, seen, draws, few, plain)
        if way == cheap:
            return scores, f"{way} of {LONG} candidates"
        best = torch.unique(scores.argsort(dim=1)[:, :SHORT])
        again = self.draws([[place] for place in best.tolist()], times)
        finals = WAYS[way](seen, again, plain.take(best))
        # all others rank behind those that were run
        scores = scores - scores.amin(dim=1, keepdim=True) + finals.amax(dim=1, keepdim=True) + 1
        return scores.index_copy(1, best, finals), f"{way}, the best by {cheap}"


def _learnt(way: str, seen: Sketch, draws: Sketch, some: Sketch, plain: Sketch) -> Tensor:
    """[N, m]: scores of all by their updates ``plain`` [m], learnt from draws [n, times] about ``some`` [n] of them."""
    if way == "lengths":
        return LengthModel.fitted(draws, some).scores(seen, plain)
    model = next(EntryModel.fitted(draws, some, unit) for unit in UNITS if way == f"entries by {unit}")
    often = {name: own.mean(dim=0, keepdim=True) for name, own in _often(draws).items()}
    parts = [model.scores(seen, plain.take(group), often) for group in groups(len(_first(plain)), LONG)]
    return torch.cat(parts, dim=1)


def _first(sketch: Sketch) -> Tensor:
    return next(iter(sketch.lengths.values()))


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
        return one.defense, one.round_number

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
        if one.kind == "gradient" and _exactly_known(built):
            found = Identify(candidates=self.candidates).run(seen, seeds=seeds, progress=progress)
            return [replace(other, strategy="the likelihood is known, nothing was run") for other in found]
        client = SimulatedClient(one.module, recipe=one.recipe, defense=Chain(built), loss=one.loss)
        tried, size = with_labels(known, seen), min(one.batch_size or 1, len(known))
        box = BlackBox(client, one, tried.entries, ENTRIES if size == 1 else FEWER_ENTRIES, progress)
        replies = box.sketch(stack([other.reply for other in seen]))
        if size > 1:
            search = SetSearch(box, len(tried.entries), size)
            way = f"sets, entries by {search.model.unit}"
            scores = torch.stack([search.scores(replies.take(slice(i, i + 1))) for i in range(len(seen))])
        elif box.is_random([[place] for place in range(min(FEW, len(known)))]):
            scores, way = box.likelihoods(replies, self.draws)
        else:
            scores, way = box.distances(replies), "distance"
        return [
            chosen(known, own, labels, size, seed, f"replayed, compared by {way}")
            for own, labels, seed in zip(*tried.best(scores), seeds, strict=True)
        ]


def _exactly_known(links: Sequence[Defense]) -> bool:
    """Whether the likelihood through all links is known: some noise, and nothing but noise and clipping."""
    noisy = any(isinstance(link, Noise | DP) for link in links)
    return noisy and all(type(link) in (*EXACT, Defense) for link in links)
