"""Replay: run the known defense itself on every candidate, and see whose replies are like the one that was seen.

Nothing has to be known of how the defense works: it is a black box that the adversary can run. What it does to an
update is learnt from its own replies about candidates, in several ways:

- *by draws*: each tensor of a candidate's reply has a mean and a spread, as they are or for the direction and the
  length apart;
- *by entries*: what becomes of an entry depends on the entry that the client had, in a way that is the same for all
  candidates: its mean and its spread are read from all of them. The entry may count as it is, or in units of its update
  or of its tensor;
- *by lengths*: the same for the length of each tensor;
- *by inputs of layers*: what entered a linear layer stands in its gradient, whatever was drawn behind it.

Which way fits is tried out: a reply of each candidate is kept back, and the way counts that names most of them. The
truth has no part in that. A defense that draws nothing needs one reply of each candidate, and the distance to it. Of
noise on a gradient, clipped or not, and of a bare gradient the likelihood is known exactly, and nothing has to be run.

A reply may be dear. What one costs is counted, and where the budget does not reach for all candidates, those are run
that ``identify`` ranks best.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, BUDGETS, Attack, Budget, Reconstruction
from gradveil.attacks.identify import Identify, RandomChoice, candidates_of, chosen
from gradveil.attacks.parts.candidate_updates import best_first, group_size, groups, updates_for, with_labels
from gradveil.attacks.parts.cost import CostMeter, TooDearError
from gradveil.attacks.parts.sketches import (
    LEARNT,
    TINY,
    TOGETHER,
    UNITS,
    WAYS,
    EntryModel,
    Sketch,
    Sketcher,
    by_distance,
    fitting,
    learnt,
    often_sent,
)
from gradveil.attacks.parts.updates import explained
from gradveil.client import SimulatedClient, replies_in_round
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import stack
from gradveil.data import ImageSet
from gradveil.defenses import DP, Chain, Clip, ClipExamples, Defense, Noise, PublicData, Veil
from gradveil.engine import without_tf32
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

ENTRIES = 2**15
"""So many entries of an update are compared; of a smaller one all."""
FEWER_ENTRIES = 2**12
"""The same for batches, of which many sets are tried."""
SECONDS, THOROUGH_SECONDS = 20.0, 200.0
"""That replies may take, as ``CostMeter`` counts them; the second from the thorough budget on."""
REPLY = 3e-3
"""Seconds that a reply takes besides what torch computes in it."""
FEW = 3
"""Of so many candidates two replies are compared, to see whether the defense draws random numbers."""
LEAST_DRAWS = 3
"""Replies about each candidate: one is kept back to try out ways, and two have a spread."""
EXACT = (Noise, Clip, ClipExamples, DP, Veil)
"""Defenses through which the likelihood of a gradient is known exactly."""
SETS, KEPT = 120, 8
"""Batches of candidates that the defense is run on, to learn what it does; and how many of them try out ways."""
STARTS, LONGEST = 4, 60
"""Sets that a search begins with, and exchanges of a member at most."""


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
        return Sketch.combined(parts, torch.cat)

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
        return Sketch.combined(parts, torch.cat)

    @property
    def _together(self) -> int:
        return group_size(self._one.sent) if self._client.defense.batches_clients else 1

    def affordable(self, members: Sequence[int], seconds: float, least: int) -> int:
        """How many replies about so many candidates can be made in so many seconds; 0 if fewer than ``least``."""
        try:
            with CostMeter(most=seconds / least) as cost:
                self.replies([members], 0)
        except TooDearError:
            return 0
        return int(seconds / (REPLY + cost.seconds))

    def is_random(self, places: Sequence[int]) -> bool:
        """Whether two replies about the same candidates differ."""
        few, again = (self.replies([[place] for place in places], time) for time in (0, 1))
        return any(not torch.equal(own, again.entries[name]) for name, own in few.entries.items())

    def draws(self, sets: Sequence[Sequence[int]], times: int) -> Sketch:
        """[sets, times]: several replies about batches of candidates."""
        return Sketch.combined([self.replies(sets, time) for time in range(times)], partial(torch.stack, dim=1))

    def distances(self, seen: Sketch, some: Sequence[int]) -> Tensor:
        """[N, some]: how far each candidate's reply is from what was seen, of a defense that draws nothing."""
        places = [[place] for place in some]
        parts = [by_distance(seen, self.replies(places[group], 0)) for group in groups(len(places), TOGETHER)]
        return torch.cat(parts, dim=1)

    def likelihoods(self, seen: Sketch, some: Sequence[int], times: int) -> tuple[Tensor, str]:
        """How badly candidates explain what was seen, of a defense that draws, and the way they compare.

        [N, some] or, where the way ranks candidates without a reply of theirs, [N, m] of all.
        """
        draws, plain = self.draws([[place] for place in some], times), self.plain()
        few = plain.take(torch.tensor(some))
        way = fitting(draws, few)
        if way in LEARNT and len(some) < len(plain):
            return learnt(way, seen, draws, few, plain), way
        return WAYS[way](seen, draws, few), way


def shortlist(scores: Tensor, seeds: Sequence[int], count: int) -> list[int]:
    """So many candidates of scores [N, m]: the best for each update, then the second best, and so on."""
    orders = torch.stack([best_first(own, seed) for own, seed in zip(scores, seeds, strict=True)])
    return sorted(list(dict.fromkeys(orders.T.flatten().tolist()))[:count])


class SetSearch:
    """Which candidates together explain the reply about a batch, by what becomes of entries of their mean update."""

    def __init__(self, box: BlackBox, sets: Tensor) -> None:
        self.plain, self.size = box.plain(), sets.shape[1]
        draws = box.draws(sets.tolist(), 1)
        self.often = {name: own.mean(dim=0, keepdim=True) for name, own in often_sent(draws).items()}
        together, fitted = self.plain.changed(lambda own: own[sets].mean(dim=1)), slice(KEPT, None)

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
            others = {name: (own[rest].sum(dim=0) + own) / self.size for name, own in self.plain.entries.items()}
            scores = self.model.scores(reply, Sketch(others, {}, {}), self.often)[0]
            found.append(scores.index_fill(0, rest, torch.inf))
        return torch.stack(found)


def _random_sets(candidates: int, size: int, count: int) -> Tensor:
    """[count, size]."""
    rng = generator(0, "replay sets")
    return torch.stack([torch.randperm(candidates, generator=rng)[:size] for _ in range(count)])


@ATTACKS.register("replay")
@dataclass(frozen=True, kw_only=True)
class Replay(Attack):
    """Replay: run the known defense, whatever it is, on every candidate, and take who explains the reply best."""

    budget: Budget = field(default=BUDGETS["standard"], kw_only=False)
    """How many replies it can afford."""
    candidates: str | None = None
    """The spec of a data set to choose from, where it is not the one that the threat model grants."""
    draws: int = 5
    """How often the defense is run on each candidate at most, if it draws random numbers."""
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES, Knowledge.DEFENSE, Knowledge.RECIPE})

    def __post_init__(self) -> None:
        if self.draws < LEAST_DRAWS:
            raise GradveilError(
                f"attack replay: draws is at least {LEAST_DRAWS}, not {self.draws}: one is kept back to try out ways"
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
        identify = Identify(candidates=self.candidates)
        if one.kind == "gradient" and _exactly_known(built):
            found = identify.run(seen, seeds=seeds, progress=progress)
            return [replace(other, strategy="the likelihood is known, nothing was run") for other in found]
        defense = built[0] if len(built) == 1 else Chain(built)  # a chain serves one client after another
        client = SimulatedClient(one.module, recipe=one.recipe, defense=defense, loss=one.loss)
        tried, size = with_labels(known, seen), min(one.batch_size or 1, len(known))
        box = BlackBox(client, one, tried.entries, ENTRIES if size == 1 else FEWER_ENTRIES, progress)
        replies = box.sketch(stack([other.reply for other in seen]))
        seconds = THOROUGH_SECONDS if self.budget.restarts >= BUDGETS["thorough"].restarts else SECONDS
        least = 2 * LEAST_DRAWS if size == 1 else 2 * KEPT
        affordable = box.affordable(range(size), seconds, least)
        if affordable < least:
            found = identify.run(seen, seeds=seeds, progress=progress)
            return [replace(other, strategy="a reply is too dear: nothing was run") for other in found]
        if size == 1:
            scores, strategy = self._ranked(box, replies, affordable, seen, tried.entries, seeds, progress)
        else:
            search = SetSearch(box, _random_sets(len(tried.entries), size, min(SETS, affordable)))
            scores = torch.stack([search.scores(replies.take(slice(i, i + 1))) for i in range(len(seen))])
            strategy = f"replayed, compared by sets, entries by {search.model.unit}"
        return [
            chosen(known, own, labels, size, seed, strategy)
            for own, labels, seed in zip(*tried.best(scores), seeds, strict=True)
        ]

    def _ranked(
        self,
        box: BlackBox,
        replies: Sketch,
        affordable: int,
        seen: Sequence[Observation],
        entries: ImageSet,
        seeds: Sequence[int],
        progress: Progress,
    ) -> tuple[Tensor, str]:
        """[N, m]: how badly each entry explains each update, and how they were compared.

        Where the defense cannot be run on all, those come first that ``identify`` ranks best. All others rank behind.
        """
        count = len(entries)
        random = box.is_random(range(min(FEW, count, max(1, affordable // 20))))
        draws = max(LEAST_DRAWS, min(self.draws, affordable // count)) if random else 1
        some, before = list(range(count)), torch.zeros(len(seen), count)
        if affordable < draws * count:
            simulated = [explained(one, "simulated") for one in seen]
            first, identify = simulated[0], Identify(candidates=self.candidates)
            before = identify.scores(simulated, entries, progress, updates_for(first), identify.likelihood(first))
            some = shortlist(before, seeds, affordable // draws)
        scores, way = box.likelihoods(replies, some, draws) if random else (box.distances(replies, some), "distance")
        strategy = f"replayed, compared by {way}"
        if len(some) < count:
            times = "1 draw each" if draws == 1 else f"{draws} draws each"
            strategy = f"replayed {len(some)} of {count} candidates, {times}, compared by {way}"
        if scores.shape[1] == count:
            return scores, strategy
        if len(some) < 2 * len(seen):  # the best for one update would come before the best for another
            return before, f"{strategy}: too few, ranked by identify"
        behind = before.double().nan_to_num() - before.nan_to_num().amin(dim=1, keepdim=True)
        behind = behind + scores.amax(dim=1, keepdim=True) + 1
        return behind.index_copy(1, torch.tensor(some), scores.double()), strategy


def _exactly_known(links: Sequence[Defense]) -> bool:
    """Whether the likelihood through all links is known: no defense, or noise with nothing but clipping beside it."""
    acting = [type(link) for link in links if type(link) is not Defense]
    noisy = any(issubclass(link, Noise | DP) for link in acting)
    return not acting or (noisy and all(link in EXACT for link in acting))
