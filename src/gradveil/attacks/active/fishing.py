"""Fishing for User Data (Wen et al. 2022): a crafted classifier lets one example of a large batch speak alone.

Every question keeps one row of the classifier, the target's, and makes the others zero. Then the layers below learn
only through that row, and an example moves them by (p - y) times what it would move them alone: p is how likely it is
called the target, y whether it is. The first question, with no row at all, counts the labels. The second makes p zero:
what is left are the examples of the target class, which is enough if there is one. For several, the third sends a row
that tells the target class from the batch, again with p zero, and the next ones open that gate: an example above the
cut has p = 1, and the difference to the third holds those examples alone. The cut rises until one is left.

Everything is read off the gradient of the classifier. With the bias as one more column, row k of it is the mean over
the batch of (p_k - [k is the label]) (h, 1), for representations h. Fishing chooses p, the same for all examples or one
of two values, so rows give sums of h and counts of examples, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, BUDGETS, Attack, Budget, Crafted, Reconstruction, Server
from gradveil.attacks.parts.updates import explained
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.trees import scaled, subtract
from gradveil.core.types import Params, Recipe
from gradveil.domains import Domain
from gradveil.models import classifier
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

_CLOSED = 1000.0
"""How far down the target's score is pushed, and how high a closed gate cuts: p becomes zero exactly."""
_ONE = 0.05
"""How far a count may be from one example: more is another example in a gate that half opens for it."""
_SOME = 0.5
"""Fewer examples than this above a cut are none: such a gate says what the closed one says."""
_CLEAR = 3.0
"""How far above the cut, in scores, one example has to lie."""
_ROUNDING = 3e-6
"""As a share of a mean representation: what two that are the same differ by."""
_STEEP = 300.0
"""How many levels of a drawn feature the length of the mean is: examples of a class differ by a part of that."""

Strategy = Literal["auto", "class", "feature"]


class Gate(NamedTuple):
    """A cut of the feature, how many examples lie above it, and their mean level."""

    cut: float
    above: float
    level: float


@dataclass(frozen=True)
class Feature:
    """A direction of representations, scaled so that the batch's mean lies at 0 and the mean of the target at 1."""

    along: Tensor
    origin: Tensor

    def level(self, representation: Tensor) -> float:
        return float(self.along @ representation - self.origin)


class ClientReplies:
    """The replies of one client, in the order of the questions: all rows zero, class, closed gate, gates."""

    def __init__(self, replies: Sequence[Observation], target: int | None) -> None:
        self.replies = [explained(one, "averaged") for one in replies]
        self.size = self.replies[0].batch_size or 1
        self._wanted = target

    def __len__(self) -> int:
        return len(self.replies)

    @cached_property
    def names(self) -> tuple[str, str]:
        """The classifier's weight and bias."""
        layer = classifier(self.replies[0].module, self.replies[0].domain)
        return f"{layer}.weight", f"{layer}.bias"

    @cached_property
    def counts(self) -> Tensor:
        """[classes] of int64: examples of each class, which add up to the batch; from the first reply.

        All rows zero make every p one over the number of classes, and the bias gradient that less the share of the
        class.
        """
        errors = self.replies[0].reply[self.names[1]]
        owed = (1 / len(errors) - errors).clamp(min=0) + 1e-9
        owed = self.size * owed / owed.sum()
        whole = (owed + 1e-3).floor()
        missing = self.size - int(whole.sum())
        most_owed = (owed - whole).argsort(descending=True, stable=True)
        return whole.scatter_add(0, most_owed[: max(0, missing)], torch.ones_like(whole)).long()

    @cached_property
    def target(self) -> int:
        """The class that is fished for: the one asked for, or the rarest there is."""
        if self._wanted is not None:
            return self._wanted
        return int(self.counts.where(self.counts > 0, self.size + 1).argmin())

    def row(self, number: int) -> Tensor:
        """[features + 1]: the target's row of one reply, the bias last."""
        weight, bias = (self.replies[number].reply[name][self.target] for name in self.names)
        return torch.cat([weight, bias[None]])

    @cached_property
    def of_target(self) -> int:
        """Examples of the target class, by the second reply: there p is zero, and only they are left in the row."""
        return round(-self.size * float(self.row(1)[-1]))

    @cached_property
    def feature(self) -> Feature:
        """From the mean of the batch to the mean of the target class. The first two replies give both means.

        Where the batch is of one class they differ by rounding, which is no direction: then any that is drawn will do.
        """
        classes = len(self.replies[0].reply[self.names[1]])
        batch = classes * (self.row(0) - self.row(1))[:-1]
        own = self.row(1)[:-1] / self.row(1)[-1]
        apart = own - batch
        if apart.norm() <= _ROUNDING * own.norm():
            drawn = own * torch.randn(len(own), generator=generator(0, "feature")).to(own)
            along = _STEEP * len(own) ** 0.5 * drawn / own.square().sum()
            return Feature(along, along @ own - 1)
        along = apart / apart.square().sum()
        return Feature(along, along @ batch)

    def caught(self, number: int) -> tuple[float, float]:
        """How many examples lie above the cut of a gate, and their mean level; not whole where a gate half opens."""
        opened = self.row(number) - self.row(2)
        return self.size * float(opened[-1]), self.feature.level(opened[:-1] / opened[-1])

    @property
    def gates(self) -> range:
        """Numbers of the replies to gates."""
        return range(3, len(self.replies))

    def above(self, gate: int) -> tuple[Observation, Params]:
        """The closed gate, and what one example replies to it, if it alone lies above the cut of another.

        The two replies differ in those examples only; their labels, which move both alike, cancel out.
        """
        return self.replies[2], scaled(subtract(self.replies[2].reply, self.replies[gate].reply), self.size)

    def of_class(self) -> tuple[Observation, Params]:
        """The class question, and the mean of what the examples of the target class reply to it alone.

        The other rows hold the whole batch, but what they would hold without it follows from the target's: they share
        evenly what it loses.
        """
        mean = scaled(self.replies[1].reply, self.size / max(1, self.of_target))
        for name in self.names:
            own = mean[name][self.target]
            rows = (-own / (len(mean[name]) - 1)).expand_as(mean[name]).clone()
            rows[self.target] = own
            mean[name] = rows
        return self.replies[1], mean


@ATTACKS.register("fishing")
@dataclass(frozen=True)
class Fishing(Attack):
    """Fishing (Wen et al. 2022): crafted classifiers until one example's gradient stands alone, which is then inverted.

    ``then`` is the attack that inverts it, its options parted by semicolons, as in ``then=ig:tv=0.01;restarts=4``.
    """

    budget: Budget = BUDGETS["standard"]
    _: KW_ONLY
    target: int | None = None
    strategy: Strategy = "auto"
    queries: int = 10
    boost: float = 1000.0
    then: str = "ig"
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE, Knowledge.CRAFT, Knowledge.ASK_AGAIN})

    def __post_init__(self) -> None:
        if self.queries < 4 or not self.boost > 0 or (self.target is not None and self.target < 0):
            raise GradveilError("attack fishing: queries is at least 4, boost above 0 and target a class from 0")
        if self.inverting.crafts:
            raise GradveilError(
                f"attack fishing: then={self.then} asks questions of its own: name an attack that only inverts"
            )

    @cached_property
    def inverting(self) -> Attack:
        """The attack on what one example replied alone."""
        return ATTACKS.build(self.then.replace(";", ","), self.budget)

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:  # noqa: ARG002
        weight, bias = _classifier(server)
        if self.target is not None and self.target >= server.domain.classes:
            raise GradveilError(f"attack fishing: target={self.target}, but there are {server.domain.classes} classes")
        if not history:
            return _with_one_row(server, 0, torch.zeros_like(server.sent[weight][0]), 0.0)
        replies = ClientReplies(history, self.target)
        target = replies.target
        if len(replies) == 1:
            kept, closed = server.sent[weight][target], float(server.sent[bias][target]) - _CLOSED
            return _with_one_row(server, target, self.boost * kept, self.boost * closed)
        cut, feature = self._next_cut(replies), replies.feature
        if cut is None:
            return None
        half = math.log(server.domain.classes - 1) - self.boost * (float(feature.origin) + cut)
        return _with_one_row(server, target, self.boost * feature.along, half)

    def _next_cut(self, replies: ClientReplies) -> float | None:
        """Where the next gate cuts, in levels of the feature; None if there is nothing more to ask."""
        if len(replies) == 2:
            several = self.strategy == "feature" or (self.strategy == "auto" and replies.of_target > 1)
            return _CLOSED if several and bool(replies.feature.along.isfinite().all()) else None
        gates = self._gates(replies)
        if len(replies) >= self.queries or (gates and self._single(gates[-1])):
            return None
        return raised(gates)

    def _gates(self, replies: ClientReplies) -> list[Gate]:
        """The gates asked so far: each follows from those before it."""
        gates: list[Gate] = []
        for number in replies.gates:
            gates.append(Gate(raised(gates), *replies.caught(number)))
        return gates

    def _single(self, gate: Gate) -> bool:
        """Whether one example lies clearly above the cut: two that both half open it would count as one as well."""
        return abs(gate.above - 1) < _ONE and self.boost * (gate.level - gate.cut) > _CLEAR

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        found = self.inverting([self.isolated(one) for one in seen], seeds=seeds, progress=progress)
        placed = []
        for image, one in zip(found, seen, strict=True):
            replies = self._replies(one)
            labels = torch.arange(len(replies.counts)).repeat_interleave(replies.counts.cpu())
            if one.labels is not None:
                labels = one.labels.cpu()
            if bool((labels == replies.target).any()):
                questions = f"{image.strategy}, after {len(replies)} questions"
                placed.append(replace(amid_blanks(image, labels, replies.target, one.domain), strategy=questions))
            else:
                nothing = one.domain.blank(len(labels))
                strategy = f"no image of class {replies.target}"
                placed.append(replace(image, inputs=nothing, labels=labels, strategy=strategy))
        return placed

    def isolated(self, seen: Observation) -> Observation:
        """What the client would have replied to one of the questions had its batch been one example."""
        replies = self._replies(seen)
        gates = self._gates(replies)
        caught = [i for i, gate in enumerate(gates) if gate.above > _SOME]
        best = min(caught, key=lambda i: (not self._single(gates[i]), abs(gates[i].above - 1)), default=None)
        asked, gradient = replies.of_class() if best is None else replies.above(replies.gates[best])
        label = torch.tensor([replies.target], device=next(iter(gradient.values())).device)
        recipe = None if asked.recipe is None else Recipe(lr=asked.recipe.lr, train_mode=asked.recipe.train_mode)
        alone = replace(asked, batch_size=1, labels=label, statistics=None, earlier=())
        return replace(alone, reply=gradient, kind="gradient", recipe=recipe)

    def _replies(self, seen: Observation) -> ClientReplies:
        if not seen.earlier:
            raise GradveilError(
                "attack 'fishing' reads replies to its own questions, and this broadcast is none of them"
            )
        return ClientReplies([*seen.earlier, seen], self.target)

    def prior_only(self) -> Attack | None:
        alone = self.inverting.prior_only()
        return None if alone is None else Unaided(alone)


@dataclass(frozen=True)
class Unaided(Attack):
    """The search for one example without any reply, amid blank ones: what chance looks like."""

    alone: Attack

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        found = self.alone([replace(one, batch_size=1) for one in seen], seeds=seeds, progress=progress)
        drawn = [
            torch.randint(one.domain.classes, (one.batch_size or 1,), generator=generator(seed, "labels"))
            for one, seed in zip(seen, seeds, strict=True)
        ]
        return [
            amid_blanks(image, labels, int(image.labels), one.domain)
            for image, labels, one in zip(found, drawn, seen, strict=True)
        ]


def amid_blanks(found: Reconstruction, labels: Tensor, label: int, domain: Domain) -> Reconstruction:
    """One example at the first place of its label (the very first if it has none), and blank ones at all others."""
    place = int((labels == label).int().argmax())
    inputs = domain.blank(len(labels))
    inputs[place] = found.inputs[0]
    return replace(found, inputs=inputs, labels=labels)


def raised(gates: Sequence[Gate]) -> float:
    """The next cut: up to the mean level of those above the last one, back if none is left."""
    if not gates:
        return 1.0  # the mean of the target class, so that at least one of its examples lies above
    low = max((gate.cut for gate in gates if gate.above > 1 + _ONE), default=0.0)
    high = min((gate.cut for gate in gates if gate.cut > low), default=math.inf)
    last = gates[-1]
    if last.above > 1 + _ONE and low < last.level < min(high, _CLOSED):
        return last.level
    return (low + high) / 2 if high < math.inf else 2 * low + 1


def _classifier(server: Server) -> tuple[str, str]:
    """The names of the classifier's weight and bias."""
    layer = classifier(server.module, server.domain)
    if server.domain.classes < 2:
        raise GradveilError("attack 'fishing' plays classes off against each other and needs two or more")
    if not {f"{layer}.weight", f"{layer}.bias"} <= server.sent.keys():
        raise GradveilError(
            f"attack 'fishing' needs a classifier with a bias, both trained, and {layer!r} has none: use another model"
        )
    return f"{layer}.weight", f"{layer}.bias"


def _with_one_row(server: Server, target: int, row: Tensor, bias: float) -> Crafted:
    """The broadcast with a classifier that is zero but for the target's row and bias."""
    names = _classifier(server)
    changed = {name: torch.zeros_like(server.sent[name]) for name in names}
    changed[names[0]][target], changed[names[1]][target] = row, bias
    return Crafted(module=server.module, model=server.model, sent={**server.sent, **changed}, tampered=names)
