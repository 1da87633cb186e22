"""Identification: which of the candidates that the adversary holds explains the update best."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack, Budget, Reconstruction
from gradveil.attacks.identification.informed import drawing_inputs, likeness_along, likeness_for
from gradveil.attacks.identification.likeness import Angle, Likeness, OfAll
from gradveil.attacks.identification.path import Path, straight
from gradveil.attacks.identification.together import FITTED, Together
from gradveil.attacks.identification.updates import Updates, group_size, groups, updates_for
from gradveil.attacks.parts.updates import explained
from gradveil.core.errors import GradveilError
from gradveil.core.precise import without_tf32
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.data import ImageSet, load
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

WALKS = 2
"""How often the path of several steps is walked again with those who explain it best so far."""

NEARER = 10
"""By how much nearer each walk is taken to come to the true path."""


def has_path(one: Observation) -> bool:
    """Whether an update is of several steps of several examples, and the adversary knows how they were taken."""
    known = one.recipe is not None and one.defense is not None
    return known and one.kind == "delta" and (one.batch_size or 1) > 1


@dataclass(frozen=True, kw_only=True)
class Identify(Attack):
    """Rank every candidate by how well its own update explains what was seen, and return the best."""

    title: str
    likeness: Callable[[Observation], Likeness]
    candidates: str | None = None
    """The spec of a data set to choose from, where it is not the one that the threat model grants."""
    draws: int = 0
    """How often a candidate is looked at where the defense is known to change inputs by chance; 0: take no notice."""
    along: bool = False
    """Explain updates of several steps of several examples along the path that they took."""
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES})

    def kind_of(self, one: Observation) -> Hashable:
        return one.defense

    def prior_only(self) -> Attack | None:
        return Blindly(candidates=self.candidates)

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        seen = [explained(one, "averaged" if one.recipe is None else "simulated") for one in seen]
        known = candidates_of(seen[0], self.candidates)
        if self.along and has_path(seen[0]):
            scores = torch.stack([self.scores_along(straight(one), known, progress) for one in seen])
        else:
            scores = self.scores(seen, known, progress, updates_for(seen[0]), self.likeness(seen[0]))
        size = min(seen[0].batch_size or 1, len(known))
        best = scores.argsort(dim=1, stable=True)[:, :size]
        return [_chosen(known, best[i], scores[i], "compared in groups") for i in range(len(seen))]

    def scores_along(self, path: Path, known: ImageSet, progress: Progress) -> Tensor:
        """[candidates]: how badly each explains the update of one path, which the best of them walk again."""
        likeness, device = likeness_along(path.seen()), next(iter(path.one.sent.values())).device
        scores = self.scores([path.seen()], known, progress, path.updates(), likeness)[0]
        if not isinstance(likeness, Together):
            return scores
        best = scores.argsort(stable=True)[: max(FITTED // path.parts, 2 * likeness.examples)]
        finalists, batch = known.subset(best), known.batch(best).to(device)
        shares = (-scores[best]).expand(path.parts, -1)
        for _ in range(WALKS):
            path, likeness = path.walked(batch, shares), replace(likeness, rough=likeness.rough / NEARER)
            each = [
                self.compared([path.seen()], finalists, progress, path.updates(part), likeness)
                for part in range(path.parts)
            ]
            shares = -likeness.settled(torch.cat(each, dim=1).T, [path.seen().reply]).view(path.parts, -1)
        again = -shares.sum(dim=0)
        return (scores - scores.min() + again.max()).index_copy(0, best, again)  # all others rank behind them

    def scores(
        self, seen: Sequence[Observation], known: ImageSet, progress: Progress, updates: Updates, likeness: Likeness
    ) -> Tensor:
        """How badly each candidate explains each update, [N, candidates]; lower is better."""
        rows = self.compared(seen, known, progress, updates, likeness)
        replies = [one.reply for one in seen]
        return likeness.settled(rows.T, replies) if isinstance(likeness, OfAll) else rows

    def compared(
        self, seen: Sequence[Observation], known: ImageSet, progress: Progress, updates: Updates, likeness: Likeness
    ) -> Tensor:
        """[N, candidates]: what the likeness says of each by itself; entries [n, candidates] where it needs all."""
        one, replies = seen[0], [other.reply for other in seen]
        score = likeness.against(replies)
        changing = drawing_inputs(one) if self.draws else None
        device = next(iter(one.sent.values())).device
        found = []
        with progress.task(self.title, len(known), "candidates") as task, torch.no_grad(), without_tf32():
            for group in groups(len(known), group_size(one.sent)):
                batch = known.batch(range(group.start, group.stop)).to(device)
                looks, rng = [batch.inputs], Stream.seeded(0, "identify", group.start)
                if changing is not None:
                    looks = [changing.on_inputs(batch.inputs, rng) for _ in range(self.draws)]
                each = [score(updates(inputs, batch.labels)) for inputs in looks]
                found.append(torch.stack(each).amin(dim=0).T.cpu())
                task.advance(len(batch))
        return torch.cat(found, dim=1)


@dataclass(frozen=True, kw_only=True)
class Blindly(Attack):
    """A candidate drawn without the update: what chance looks like."""

    candidates: str | None
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES})

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        known = candidates_of(seen[0], self.candidates)
        scores = [torch.rand(len(known), generator=generator(seed, "blindly")) for seed in seeds]
        size = min(seen[0].batch_size or 1, len(known))
        return [_chosen(known, each.argsort()[:size], each, "drawn") for each in scores]


def candidates_of(one: Observation, spec: str | None) -> ImageSet:
    """The candidates that a spec names, or those that the threat model grants, if they are of the right kind."""
    known = one.candidates if spec is None else load(spec)
    if known is None:
        raise GradveilError("the observation comes without candidates: name a data set of them with candidates=DATA")
    if known.shape != one.domain.shape or len(known.class_names) > one.domain.classes:
        sizes = ["x".join(map(str, shape)) for shape in (known.shape, one.domain.shape)]
        raise GradveilError(
            f"candidates of {known.name} are {sizes[0]} in {len(known.class_names)} classes, but the model takes "
            f"{sizes[1]} in {one.domain.classes}: choose other candidates="
        )
    return known


def _chosen(known: ImageSet, best: Tensor, scores: Tensor, strategy: str) -> Reconstruction:
    """The best candidates as a reconstruction, with the scores of all."""
    batch, objective = known.batch(best), float(scores[best[0]])
    return Reconstruction(
        inputs=batch.inputs,
        labels=batch.labels,
        objective=objective,
        objectives=(objective,),
        steps=(0,),
        trace=(objective,),
        stopped="converged",
        problem_steps=len(known),
        strategy=strategy,
        candidates=known.name,
        scores=scores,
    )


@ATTACKS.register("identify")
def identify(
    budget: Budget,  # noqa: ARG001
    *,
    candidates: str | None = None,
    informed: bool = True,
    draws: int = 16,
) -> Attack:
    """Identification: the candidate whose own update explains what was seen best, by what the known defense leaves."""
    if draws < 1:
        raise GradveilError(f"attack identify: draws is at least 1, not {draws}")
    return Identify(
        title="identification",
        likeness=likeness_for if informed else _angle,
        candidates=candidates,
        draws=draws if informed else 0,
        along=informed,
    )


def _angle(_: Observation) -> Likeness:
    return Angle()
