"""One trial: what is certified or recognised of a candidate, and what a short training with it reaches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradveil import models
from gradveil.auditing.case import Case
from gradveil.auditing.run import run
from gradveil.auditing.sources import simulated
from gradveil.auditing.verdict import NO_COUNTER_MOVE
from gradveil.bounds import certificate
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.seeding import generator
from gradveil.data import ImageSet
from gradveil.defenses import DEFENSES, DP, Chain, Defense, Ledger, Veil, check_model, links_of
from gradveil.federated import Federation
from gradveil.federated.run import data_of
from gradveil.lab.advise.question import LINE_UP, Candidate, Question, clearness
from gradveil.models import PublicFeatures, encoded

FIRST = 8
"""Images of a first look: a defense that hides none of them is not looked at again."""
CANDIDATES = 150
"""Examples of an audit: the private ones, and others to mistake them for."""
SCRATCH = "scratch-"
"""How folders of audits begin that hold private examples, and are removed."""
LEAST_EACH = 8
"""Examples that a client of a short training has at least."""


@dataclass(frozen=True)
class Privacy:
    """The share of examples that may be recognised, at its upper end."""

    recognised: float
    interval: tuple[float, float]
    certified: bool
    untried: bool = False
    """Whether nobody has attacked this defense by name: what was measured is then no reason to trust it."""


class Laboratory:
    """The data of a question, cut for short trainings and audits. The test data are never looked at."""

    def __init__(self, asked: Question, folder: Path, progress: Progress = SILENT) -> None:
        self.asked, self._folder = asked, folder
        self._audits: dict[tuple[str, str], Privacy] = {}
        self._features: dict[str, list[Tensor]] = {}
        self._progress = progress
        whole, _ = data_of(Candidate(model=asked.model, defense="none", lr=1.0, rounds=2).training(
            asked, clients=asked.clients, examples=1), progress)  # fmt: skip
        self.whole = len(whole)
        """Examples that the clients of the whole training share."""
        if self.whole < asked.clients:
            raise GradveilError(f"{self.whole} examples are too few for {asked.clients} clients: name fewer clients")
        order = torch.randperm(self.whole, generator=generator(asked.seed, "advise", "short"))[: asked.short]
        held_out = max(1, len(order) // 5)
        self.held_out: ImageSet = whole.subset(order[:held_out].sort().values)
        self.train: ImageSet = whole.subset(order[held_out:].sort().values)
        self.audited: ImageSet = whole.subset(order[:CANDIDATES])
        self.clients = max(1, min(asked.clients, len(self.train) // LEAST_EACH))
        """Of a short training."""

    @property
    def shortened(self) -> str:
        """What is smaller than in the whole training, in words."""
        parts = [f"{len(self.train):,} of {self.whole:,} examples", f"{len(self.held_out):,} others to evaluate on"]
        if self.clients < self.asked.clients:
            parts.append(f"{self.clients} of {self.asked.clients} clients")
        return f"{', '.join(parts)}; noise that is divided by examples is scaled to what it is among all of them"

    def privacy(self, candidate: Candidate) -> Privacy:
        """The certified ceiling of the whole training or, without one, what two attacks that hold candidates find.

        Raises:
            GradveilError: if the defense cannot work on the model.
        """
        defense = DEFENSES.build(candidate.defense)
        check_model(defense, models.build(candidate.model, self.train.domain, seed=self.asked.seed))
        if any(isinstance(link, DP) and link.steps for link in links_of(defense)):
            return proved(candidate.defense)
        key = candidate.model, candidate.defense
        if key not in self._audits:
            found = self._audit(candidate, FIRST, ("identify",))
            if found.recognised < 1.0 and candidate.defense != "none":
                found = self._audit(candidate, self.asked.images, ("identify", "replay"))
            self._audits[key] = found
        return self._audits[key]

    def _audit(self, candidate: Candidate, images: int, attacks: tuple[str, ...]) -> Privacy:
        images = min(images, len(self.audited) // 2)
        if images < 1:
            raise GradveilError(f"{len(self.audited)} examples are too few for an audit")
        case = Case(
            data=self.asked.data, model=candidate.model, defenses=(candidate.defense,), attacks=attacks, images=images,
            gallery=LINE_UP, budget="quick", seed=self.asked.seed, device=self.asked.device,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self._folder) as folder:
            (verdict,) = run(simulated(case, self.audited), Path(folder) / "audit").verdicts
        found, interval = verdict.identified, verdict.identified_interval
        if found is None or interval is None:
            raise GradveilError("a short audit could not be scored")
        return Privacy(found, interval, certified=False, untried=NO_COUNTER_MOVE in verdict.flags)

    def accuracies(self, candidate: Candidate, seed: int | None = None) -> Iterator[float]:
        """On held-out examples after each quarter of a short training; the last is that of the end."""
        short = candidate.training(self.asked, clients=self.clients, examples=len(self.train), seed=seed)
        full = candidate.training(self.asked, clients=self.asked.clients, examples=self.whole)
        scale = clearness(short, len(self.train)) / clearness(full, self.whole)
        federation = Federation(short, self.train, defense=_scaled(DEFENSES.build(candidate.defense), scale))
        if isinstance(federation.module, PublicFeatures):  # they are computed once for all trials
            if candidate.model not in self._features:
                sets = (self.train, self.held_out)
                self._features[candidate.model] = [
                    encoded(federation.module, one, progress=self._progress) for one in sets
                ]
            for data, seen in zip((federation.train, self.held_out), self._features[candidate.model], strict=True):
                federation.give_features(data, seen)
        marks = [max(1, short.rounds * quarter // 4) for quarter in (1, 2, 3, 4)]
        for number in range(1, short.rounds + 1):
            federation.round(number)
            for _ in range(marks.count(number)):
                yield federation.quality(self.held_out).accuracy


def proved(defense: str) -> Privacy:
    """What nobody passes in a line-up of 100, over all rounds that a defense plans.

    Raises:
        GradveilError: if nothing is proved of it.
    """
    ceiling = certificate(DEFENSES.build(defense), Ledger()).recognised[str(LINE_UP)]
    return Privacy(ceiling, (0.0, ceiling), certified=True)


def _scaled(defense: Defense, scale: float) -> Defense:
    """The same defense, with its counted noise scaled; it plans nothing, for a short training counts nothing."""
    links = [
        DP(sigma=link.sigma * scale, bound=link.bound, delta=link.delta)
        if isinstance(link, DP) and type(link) in (DP, Veil)
        else link
        for link in links_of(defense)
    ]
    return links[0] if len(links) == 1 else Chain(links)
