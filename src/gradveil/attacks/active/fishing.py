"""Fishing for User Data (Wen et al. 2022): a crafted classifier lets one example of a large batch speak alone.

Every question keeps one row of the classifier, the target's, and makes the others zero. Then the layers below learn
only through that row, and an example moves them by (p - y) times what it would move them alone: p is how likely it is
called the target, y whether it is. The first question, with no row at all, counts the labels. The second makes p zero:
what is left are the examples of the target class, which is enough if there is one. For several, the third sends a row
that tells the target class from the batch, again with p zero, and the next ones open that gate: an example above the
cut has p = 1, and the difference to the third holds those examples alone. The cut rises until one is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.active.answers import Answers
from gradveil.attacks.base import ATTACKS, Attack, Budget, Crafted, Reconstruction, Server
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.types import Recipe
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

Strategy = Literal["auto", "class", "feature"]


class Gate(NamedTuple):
    """A cut of the feature, how many examples lie above it, and their mean level."""

    cut: float
    above: float
    level: float


@dataclass(frozen=True, kw_only=True)
class Fishing(Attack):
    """Questions until one example's gradient stands alone, then any attack that inverts it."""

    then: Attack
    target: int | None
    strategy: Strategy
    queries: int
    boost: float
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE, Knowledge.CRAFT, Knowledge.ASK_AGAIN})

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:  # noqa: ARG002
        weight, bias = _classifier(server)
        if self.target is not None and self.target >= server.domain.classes:
            raise GradveilError(f"attack fishing: target={self.target}, but there are {server.domain.classes} classes")
        if not history:
            return _with_one_row(server, 0, torch.zeros_like(server.sent[weight][0]), 0.0)
        answers = Answers(history, self.target)
        target = answers.target
        if len(answers) == 1:
            kept, closed = server.sent[weight][target], float(server.sent[bias][target]) - _CLOSED
            return _with_one_row(server, target, self.boost * kept, self.boost * closed)
        cut, feature = self._next_cut(answers), answers.feature
        if cut is None:
            return None
        half = math.log(server.domain.classes - 1) - self.boost * (float(feature.origin) + cut)
        return _with_one_row(server, target, self.boost * feature.along, half)

    def _next_cut(self, answers: Answers) -> float | None:
        """Where the next gate cuts, in levels of the feature; None if there is nothing more to ask."""
        if len(answers) == 2:
            several = self.strategy == "feature" or (self.strategy == "auto" and answers.of_target > 1)
            return _CLOSED if several and bool(answers.feature.along.isfinite().all()) else None
        gates = self._gates(answers)
        if len(answers) >= self.queries or (gates and self._single(gates[-1])):
            return None
        return raised(gates)

    def _gates(self, answers: Answers) -> list[Gate]:
        """The gates asked so far: each follows from those before it."""
        gates: list[Gate] = []
        for number in answers.gates:
            gates.append(Gate(raised(gates), *answers.caught(number)))
        return gates

    def _single(self, gate: Gate) -> bool:
        """Whether one example lies clearly above the cut: two that both half open it would count as one as well."""
        return abs(gate.above - 1) < _ONE and self.boost * (gate.level - gate.cut) > _CLEAR

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        found = self.then([self.isolated(one) for one in seen], seeds=seeds, progress=progress)
        return [self._placed(image, one) for image, one in zip(found, seen, strict=True)]

    def isolated(self, seen: Observation) -> Observation:
        """What the client would have replied to one of the questions had its batch been one example."""
        answers = self._answers(seen)
        gates = self._gates(answers)
        caught = [i for i, gate in enumerate(gates) if gate.above > _SOME]
        best = min(caught, key=lambda i: (not self._single(gates[i]), abs(gates[i].above - 1)), default=None)
        asked, gradient = answers.of_class() if best is None else answers.above(answers.gates[best])
        label = torch.tensor([answers.target], device=next(iter(gradient.values())).device)
        recipe = None if asked.recipe is None else Recipe(lr=asked.recipe.lr, train_mode=asked.recipe.train_mode)
        return replace(
            asked,
            reply=gradient,
            kind="gradient",
            recipe=recipe,
            batch_size=1,
            labels=label,
            statistics=None,
            earlier=(),
        )

    def _answers(self, seen: Observation) -> Answers:
        if not seen.earlier:
            raise GradveilError(
                "attack 'fishing' reads replies to its own questions, and this broadcast is none of them"
            )
        return Answers([*seen.earlier, seen], self.target)

    def _placed(self, found: Reconstruction, seen: Observation) -> Reconstruction:
        """The image among the labels that were counted, at the first place of its class."""
        answers = self._answers(seen)
        labels = torch.arange(len(answers.counts)).repeat_interleave(answers.counts.cpu())
        if seen.labels is not None:
            labels = seen.labels.cpu()
        if not bool((labels == answers.target).any()):
            nothing = torch.full((len(labels), *found.inputs.shape[1:]), 0.5)
            return replace(found, inputs=nothing, labels=labels, strategy=f"no image of class {answers.target}")
        questions = f"{found.strategy}, after {len(answers)} questions"
        return replace(amid_gray(found, labels, answers.target), strategy=questions)

    def prior_only(self) -> Attack | None:
        alone = self.then.prior_only()
        return None if alone is None else Unaided(alone)


@dataclass(frozen=True)
class Unaided(Attack):
    """The search for one image without any reply, amid gray: what chance looks like."""

    alone: Attack

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        found = self.alone([replace(one, batch_size=1) for one in seen], seeds=seeds, progress=progress)
        drawn = [
            torch.randint(one.domain.classes, (one.batch_size or 1,), generator=generator(seed, "labels"))
            for one, seed in zip(seen, seeds, strict=True)
        ]
        return [amid_gray(image, labels, int(image.labels)) for image, labels in zip(found, drawn, strict=True)]


def amid_gray(found: Reconstruction, labels: Tensor, label: int) -> Reconstruction:
    """One image at the first place of its label (the very first if it has none), and gray at all others."""
    place = int((labels == label).int().argmax())
    inputs = torch.full((len(labels), *found.inputs.shape[1:]), 0.5)
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
    if f"{layer}.bias" not in server.sent:
        raise GradveilError(
            f"attack 'fishing' needs a classifier with a bias, and {layer!r} has none: use another model"
        )
    return f"{layer}.weight", f"{layer}.bias"


def _with_one_row(server: Server, target: int, row: Tensor, bias: float) -> Crafted:
    """The broadcast with a classifier that is zero but for the target's row and bias."""
    names = _classifier(server)
    changed = {name: torch.zeros_like(server.sent[name]) for name in names}
    changed[names[0]][target], changed[names[1]][target] = row, bias
    return Crafted(module=server.module, model=server.model, sent={**server.sent, **changed}, tampered=names)


@ATTACKS.register("fishing")
def fishing(
    budget: Budget,
    *,
    target: int | None = None,
    strategy: Strategy = "auto",
    queries: int = 10,
    boost: float = 1000.0,
    then: str = "ig",
) -> Attack:
    """Fishing (Wen et al. 2022): crafted classifiers until one example's gradient stands alone, which is then inverted.

    ``then`` is the attack that inverts it, its options parted by semicolons, as in ``then=ig:tv=0.01;restarts=4``.
    """
    if queries < 4 or not boost > 0 or (target is not None and target < 0):
        raise GradveilError("attack fishing: queries is at least 4, boost above 0 and target a class from 0")
    inverting = ATTACKS.build(then.replace(";", ","), budget)
    if inverting.crafts:
        raise GradveilError(f"attack fishing: then={then} asks questions of its own: name an attack that only inverts")
    return Fishing(then=inverting, target=target, strategy=strategy, queries=queries, boost=boost)
