"""Identification: which of the candidates that the adversary holds explains the update best."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, Attack, Reconstruction
from gradveil.attacks.parts.candidate_updates import Updates, best_first, group_size, groups, updates_for, with_labels
from gradveil.attacks.parts.channel import Channel, Span
from gradveil.attacks.parts.counter import channels_of
from gradveil.attacks.parts.likelihood import (
    Angle,
    By,
    Directions,
    Distance,
    InputSpan,
    Likelihood,
    OrthogonalLikelihood,
)
from gradveil.attacks.parts.mixture import FITTED, MixtureFit
from gradveil.attacks.parts.path import Path, straight
from gradveil.attacks.parts.updates import explained
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.data import ImageSet, load
from gradveil.defenses import Chain, Defense
from gradveil.engine import without_tf32
from gradveil.models import classifier
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

WALKS = 2
"""How often the path of several steps is walked again with those who explain it best so far."""

NEARER = 10
"""By how much nearer each walk is taken to come to the true path."""

OFF_PATH = 0.1
"""How far, as a share, a mean gradient may be off that was taken along a path that is not known exactly."""


def _of_several(one: Observation, mixture: MixtureFit) -> Likelihood:
    """Where inputs were changed by chance and not all changes are tried, a mixture lacks some who took part.

    What entered the classifier shows them one by one, for fewer than classes.
    """
    if drawing_inputs(one) is None:
        return _through(channels_of(one), mixture)
    if mixture.examples >= one.domain.classes:
        return Angle()
    return InputSpan(span=Span(f"{classifier(one.module, one.domain)}.weight", mixture.examples))


def _through(channels: Sequence[Channel], likelihood: Likelihood) -> Likelihood:
    for channel in channels:
        likelihood = likelihood.through(channel)
    return likelihood


def _can_be_followed(channels: Sequence[Channel]) -> bool:
    """Whether what each link did can still be told from what was sent, as a likelihood needs.

    Zeros tell what was not sent, until noise covers them; lengths are followed through one clipping of all there is.
    """
    pruned = next((i for i, channel in enumerate(channels) if channel.zeroed), len(channels))
    covered = any(channel.noisy for channel in channels[pruned + 1 :])
    clipped = sum(channel.bound is not None for channel in channels)
    return not covered and not any(channel.scaled for channel in channels) and clipped < 2


def changes_inputs(link: Defense | None) -> bool:
    return link is not None and type(link).on_inputs is not Defense.on_inputs


def drawing_inputs(one: Observation) -> Defense | None:
    """The known defense if it changes inputs by chance, so that a candidate has to be looked at several times."""
    changing = [link for _, link in one.known_links() if link is not None and changes_inputs(link)]
    return Chain(changing) if len(changing) > 1 else changing[0] if changing else None


@ATTACKS.register("identify")
@dataclass(frozen=True, kw_only=True)
class Identify(Attack):
    """Identification: the candidate whose own update explains what was seen best, by what the known defense leaves."""

    candidates: str | None = None
    """The spec of a data set to choose from, where it is not the one that the threat model grants."""
    informed: bool = True
    draws: int = 16
    """How often a candidate is looked at where the defense is known to change inputs by chance."""
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES})

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise GradveilError(f"attack identify: draws is at least 1, not {self.draws}")

    @property
    def title(self) -> str:
        return "identification"

    def kind_of(self, one: Observation) -> Hashable:
        return one.defense

    def prior_only(self) -> Attack | None:
        return RandomChoice(candidates=self.candidates)

    def likelihood(self, one: Observation) -> Likelihood:
        """The best way to rank under what is known.

        A likelihood needs that one gradient of one example was sent; of several examples, candidates explain it
        together. Several steps leave directions, and what is not known the angle.
        """
        if not self.informed or one.defense is None:
            return Angle()
        if one.kind == "gradient" and (one.batch_size or 1) > 1:
            return _of_several(one, MixtureFit(examples=one.batch_size or 1))
        channels = channels_of(one)
        followed = one.kind == "gradient" and _can_be_followed(channels)
        return _through(channels, Distance() if followed else Directions())

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        seen = [explained(one, "averaged" if one.recipe is None else "simulated") for one in seen]
        one, known = seen[0], candidates_of(seen[0], self.candidates)
        tried = with_labels(known, seen)
        known_run = one.recipe is not None and one.defense is not None
        if self.informed and known_run and one.kind == "delta" and (one.batch_size or 1) > 1:
            scores = torch.stack([self.scores_along(straight(one), tried.entries, progress) for one in seen])
        else:
            scores = self.scores(seen, tried.entries, progress, updates_for(one), self.likelihood(one))
        return [
            chosen(known, own, labels, one.batch_size or 1, seed, "compared in groups")
            for own, labels, seed in zip(*tried.best(scores), seeds, strict=True)
        ]

    def scores_along(self, path: Path, known: ImageSet, progress: Progress) -> Tensor:
        """[candidates]: how badly each explains the update of one path, which the best of them walk again."""
        seen, device = path.seen(), next(iter(path.one.sent.values())).device
        fit = _of_several(seen, MixtureFit(examples=seen.batch_size or 1, rough=OFF_PATH))
        scores = self.scores([seen], known, progress, path.updates(), fit)[0]
        if not isinstance(fit, MixtureFit):
            return scores
        best = scores.argsort(stable=True)[: max(FITTED // path.parts, 2 * fit.examples)]
        finalists, batch = known.subset(best), known.batch(best).to(device)
        shares = (-scores[best]).expand(path.parts, -1)
        for _ in range(WALKS):
            path, fit = path.walked(batch, shares), replace(fit, rough=fit.rough / NEARER)
            each = [
                self.compared([path.seen()], finalists, progress, path.updates(part), fit) for part in range(path.parts)
            ]
            shares = -fit.scores_of_all(torch.cat(each, dim=1).T, [path.seen().reply]).view(path.parts, -1)
        again = -shares.sum(dim=0)
        return (scores - scores.min() + again.max()).index_copy(0, best, again)  # all others rank behind them

    def scores(
        self, seen: Sequence[Observation], known: ImageSet, progress: Progress, updates: Updates, likelihood: Likelihood
    ) -> Tensor:
        """How badly each candidate explains each update, [N, candidates]; lower is better."""
        rows = self.compared(seen, known, progress, updates, likelihood)
        return likelihood.scores_of_all(rows.T, [one.reply for one in seen])

    def compared(
        self, seen: Sequence[Observation], known: ImageSet, progress: Progress, updates: Updates, likelihood: Likelihood
    ) -> Tensor:
        """[N, candidates]: what the likelihood says of each by itself; entries [n, candidates] where it needs all."""
        one, score = seen[0], likelihood.against([other.reply for other in seen])
        changing = drawing_inputs(one) if self.informed else None
        device = next(iter(one.sent.values())).device
        found = []
        with progress.task(self.title, len(known)) as task, torch.no_grad(), without_tf32():
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
class RandomChoice(Attack):
    """A candidate drawn without the update: what chance looks like."""

    candidates: str | None
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES})

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        known, size = candidates_of(seen[0], self.candidates), seen[0].batch_size or 1
        tried = with_labels(known, seen)
        scores = [torch.rand(len(tried.owners), generator=generator(seed, "blindly")) for seed in seeds]
        drawn = zip(*tried.best(torch.stack(scores)), seeds, strict=True)
        return [chosen(known, own, labels, size, seed, "drawn") for own, labels, seed in drawn]


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


def chosen(known: ImageSet, scores: Tensor, labels: Tensor, size: int, seed: int, strategy: str) -> Reconstruction:
    """The best ``size`` candidates as a reconstruction, with the scores and the labels that each [m] got."""
    best = best_first(scores, seed)[:size]
    objective = float(scores[best[0]])
    stopped = "converged" if math.isfinite(objective) else "diverged"
    found = Reconstruction.closed_form(known.batch(best).inputs, labels[best], objective, stopped=stopped)
    return replace(found, problem_steps=len(known), strategy=strategy, candidates=known.name, scores=scores)


@ATTACKS.register("fingerprint")
@dataclass(frozen=True, kw_only=True)
class Fingerprint(Identify):
    """CENSOR's fingerprint: the candidate whose gradient has the update's norms, or stands at right angles to it."""

    by: By = "norms"
    informed: ClassVar[bool] = False  # type: ignore[misc]
    draws: ClassVar[int] = 1  # type: ignore[misc]

    @property
    def title(self) -> str:
        return f"fingerprint by {self.by}"

    def likelihood(self, one: Observation) -> Likelihood:
        """The marks of CENSOR with the options that are known, or else its own defaults."""
        channels = channels_of(one if one.defense else replace(one, defense="censor"))
        return _through([channel for channel in channels if channel.span is None], OrthogonalLikelihood(by=self.by))
