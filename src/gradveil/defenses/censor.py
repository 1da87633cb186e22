"""CENSOR (Zhang et al., NDSS 2025): several random updates orthogonal to the gradient, of which the best is sent."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.trees import map_each
from gradveil.core.types import Batch, Params
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.public import public_images
from gradveil.defenses.registry import DEFENSES
from gradveil.defenses.shared import Examples
from gradveil.defenses.trials import Flat, LossAfter, LossAt, cosine, norms_of, project, project_together

POOL = 50
"""Public images to choose from, or as many as there are trials if that is more."""
CANDIDATES_AT_ONCE = {"cpu": 2**26, "cuda": 2**30}
"""Bytes that candidates under trial may take together; one of them may take more."""
FEW = 8
"""Entries of a tensor below which a random direction may well lie so near the gradient's that rounding shows."""


@DEFENSES.register("censor")
class Censor(Defense):
    """CENSOR: the best of several random updates orthogonal to the gradient."""

    def __init__(
        self,
        *,
        trials: int = 20,
        layerwise: bool = True,
        fallback: Literal["best", "skip", "original"] = "best",
        norms: Literal["preserve", "public", "random"] = "preserve",
        spread: float = 1.0,
        projection: Literal["exact", "released"] = "exact",
        source: Literal["normal", "public"] = "normal",
        public: str = "samples",
        temperature: float = 0.0,
        rounds: int | None = None,
        lr: float | None = None,
    ) -> None:
        for name, value, least in (("trials", trials, 1), ("rounds", rounds, 1)):
            if value is not None and value < least:
                raise GradveilError(f"defense censor: {name} is at least {least}, not {value}")
        for name, number in (("spread", spread), ("temperature", temperature), ("lr", lr)):
            if number is not None and not 0 <= number < math.inf:
                raise GradveilError(f"defense censor: {name} is at least 0, not {number}")
        self.trials, self.layerwise, self.fallback = trials, layerwise, fallback
        self.norms, self.spread, self.projection = norms, spread, projection
        self.source, self.public, self.temperature = source, public, temperature
        self.rounds, self.lr = rounds, lr
        self._pool: Batch | None = None
        self._loss_at: list[LossAt] = []

    def prepared(self, start: Step) -> Defense:
        """Public images, where some are needed, are read once for a local run."""
        if "public" not in (self.source, self.norms):
            return self
        ready = copy.copy(self)
        ready._pool = self._public_pool(start)
        return ready

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        active = self.rounds is None or step.round_number <= self.rounds
        step.log.add("active", float(active))
        if not active:
            step.log.add("cosine", 1.0)
            return gradient
        with torch.no_grad():
            flat = Flat(gradient)
            original = flat.joined(gradient)
            best, accepted = self._best(flat, original, step)
        step.log.add("fallback_rate", float(not accepted))
        if accepted or self.fallback == "best":
            step.log.add("cosine", cosine(best, original))
            return flat.named(best)
        step.log.add("cosine", float(self.fallback == "original"))
        return gradient if self.fallback == "original" else map_each(torch.zeros_like, gradient)

    def _best(self, flat: Flat, original: list[Tensor], step: Step) -> tuple[list[Tensor], bool]:
        """The candidate of the lowest score, and whether that is below the loss at the current parameters."""
        pieces = flat.pieces(original, self.layerwise)
        norms = norms_of(pieces)
        targets = self._targets(norms, flat, step)
        if not (self._loss_at and self._loss_at[0].fits(step)):
            self._loss_at[:] = [LossAt(step)]  # in place: a defense that was prepared for one local run shares it
        judge = LossAfter(step, flat, step.lr if self.lr is None else self.lr, self._loss_at[0])
        released, sizes = self.projection == "released", flat.one_vector()
        best, lowest = original, math.inf
        here = math.nan if step.value is None else float(step.value)
        for drawn in self._draws(flat, step):
            if sizes is not None and self.layerwise:
                project_together(drawn[0], original[0], sizes, targets, released=released)
            else:
                project(flat.pieces(drawn, self.layerwise), pieces, norms, targets, released=released)
            losses = judge(drawn, start_too=math.isnan(here) and best is original)
            if len(losses) > len(drawn[0]):
                here = losses.pop(0)
            scores = self._scores(losses, step)
            row = min(range(len(scores)), key=scores.__getitem__)
            if best is original or scores[row] < lowest:
                best, lowest = [part[row].clone() for part in drawn], scores[row]
        if not released and (self.source == "public" or flat.smallest < FEW):  # takes out what rounding left
            alone = flat.pieces([part[None] for part in best], self.layerwise)
            project(alone, pieces, norms, targets, released=False)
        return best, lowest < here

    def _scores(self, losses: list[float], step: Step) -> list[float]:
        """Below the loss at the current parameters with the probability of Metropolis's rule.

        That is min(1, (P(data | candidate) / P(data | current)) ** (1 / M)), with P = exp(-n loss) for n examples.
        """
        losses = [math.inf if math.isnan(loss) else loss for loss in losses]
        if self.temperature == 0:
            return losses
        luck = step.rng.exponential((len(losses),), torch.empty(0)).tolist()
        return [loss - self.temperature / len(step.batch) * draw for loss, draw in zip(losses, luck, strict=True)]

    def _targets(self, own: Tensor, flat: Flat, step: Step) -> Tensor:
        """The norm that each piece of a candidate gets, the same for all trials of a step."""
        if self.norms == "preserve":
            return own
        if self.norms == "random":
            return own * (self.spread * step.rng.normal((len(own),), own)).exp()
        pool = self._pool or self._public_pool(step)
        public = step.gradient(pool.take(slice(len(step.batch))))
        return norms_of(flat.pieces(flat.joined(public), self.layerwise))

    def _draws(self, flat: Flat, step: Step) -> Iterator[list[Tensor]]:
        """What candidates are made from: one [t, size] for each vector of ``flat``, as many trials as fit at once."""
        room = CANDIDATES_AT_ONCE["cuda" if step.batch.inputs.is_cuda else "cpu"]
        chunk = max(1, min(self.trials, room // flat.bytes))
        pool = (self._pool or self._public_pool(step)) if self.source == "public" else None
        order = None if pool is None else step.rng.permutation(len(pool), pool.labels.device)
        examples = None if pool is None else Examples(step)
        for start in range(0, self.trials, chunk):
            stop = min(start + chunk, self.trials)
            if pool is None or order is None or examples is None:
                yield flat.gaussian(stop - start, step.rng)
            else:
                shown = pool.take(order[start:stop])
                yield flat.joined(examples.gradients(shown), leading=1)

    def _public_pool(self, step: Step) -> Batch:
        pool = public_images(self.public, step.batch.inputs, max(POOL, self.trials), defense="censor")
        with torch.no_grad():
            classes = step.model({**step.frozen, **step.params}, pool.inputs[:2]).shape[-1]
        return Batch(pool.inputs, pool.labels % classes)
