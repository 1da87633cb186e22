"""Gradient matching: search for the inputs whose update is nearest to the observed one.

An attack of this family is a composition: labels read or searched, objective, regularisers, and one or more phases,
each a search over some prior: pixels, the code of a generator, its weights. Restarts are an axis of the batch of
problems; the best one is chosen by the attack's own objective.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.utils._pytree import tree_map

from gradveil.attacks.base import Attack, Reconstruction
from gradveil.attacks.consensus import pulled_together
from gradveil.attacks.engine import (
    Batched,
    Evaluate,
    Given,
    Plan,
    Precision,
    Strategy,
    agree,
    bound,
    plan_for,
    ways_of,
)
from gradveil.attacks.explain import Explanation, explained, local_steps
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.objectives import Objective
from gradveil.attacks.outcome import Outcome, Pictures, better, pictures_of
from gradveil.attacks.parts.channel import AsDefended, as_defended, as_trusted, cut_tensors, estimated
from gradveil.attacks.parts.counter import Averaged, BatchedMoves, CounterMove
from gradveil.attacks.population import PopulationSearch, for_population
from gradveil.attacks.priors import Pixels, Prior
from gradveil.attacks.problem import Problem
from gradveil.attacks.regularisers import Regulariser
from gradveil.attacks.search import Found, Search
from gradveil.attacks.statistics import StatisticsPrior
from gradveil.client.local import mini_batches
from gradveil.core.progress import Progress, Task
from gradveil.core.seeding import derive, generator
from gradveil.core.trees import map_each, stack
from gradveil.core.types import Params
from gradveil.joint import UnsupportedError
from gradveil.joint.moments import squares
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One search: how, and over what. The first phase gets no outcome, each later one that of the phase before."""

    search: Search | PopulationSearch
    prior: Callable[[Observation, Outcome | None], Prior]
    regularisers: tuple[tuple[float, Regulariser], ...] = ()


def over_pixels(*, free: bool = False) -> Callable[[Observation, Outcome | None], Prior]:
    """The pixels themselves are searched; ``free`` ones may leave [0, 1] on the way."""
    return lambda one, _: Pixels(one.domain, next(iter(one.sent.values())).device, free=free)


PIXELS = over_pixels()


@dataclass(frozen=True)
class Prepared:
    """A batch of problems that is ready to be stepped: the restarts of each observation one after the other."""

    prior: Prior
    given: Given
    starts: Params
    plan: Plan
    evaluate: Evaluate


@dataclass(frozen=True, kw_only=True)
class Matching(Attack):
    """Search the inputs by matching updates. Without an objective it is the prior alone: the same search, no update."""

    title: str
    objective: Objective | None
    search: Search | PopulationSearch
    restarts: int
    labels: Literal["read", "searched"] = "read"
    """Read off the last layer's gradient before the search, or unknowns of it like the pixels (DLG)."""
    prior: Callable[[Observation, Outcome | None], Prior] = PIXELS
    regularisers: tuple[tuple[float, Regulariser], ...] = ()
    later: tuple[Phase, ...] = ()
    """Searches after the first; each problem keeps the best of all by its own objective."""
    consensus: float = 0.0
    """Weight of the squared distance of each restart to the mean of all restarts (group consistency)."""
    statistics: float = 0.0
    """Weight of the batch-norm statistics, where the threat model gives them."""
    aware: bool = False
    """Estimate from the update what a defense did to it, and do the same to candidates."""
    counter: CounterMove | None = None
    """What is changed because the defense is known."""
    draws: int = 0
    """Average over so many draws of a known random defense (EOT); 0: take the update as it is."""
    explanation: Explanation = "simulated"
    strategy: Strategy = "auto"
    precision: Precision = "float32"
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})

    def prior_only(self) -> Attack | None:
        return replace(self, objective=None, statistics=0.0, labels="read", title=f"{self.title} without the update")

    def kind_of(self, one: Observation) -> Hashable:
        known = one.defense if self.draws > 0 or self.counter is not None else None
        cut = self.aware and self.objective is not None and bool(cut_tensors(one.reply))
        return known, cut  # the gradients of others need not be formed

    @property
    def problems_each(self) -> int:
        return self.restarts

    @property
    def across_broadcasts(self) -> bool:
        return self.draws == 0 and self.statistics == 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(search=self.search, prior=self.prior, regularisers=self.regularisers), *self.later)

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        if (fitting := self._fitting(seen[0])) is not self:
            return fitting.run(seen, seeds=seeds, progress=progress)
        problems = len(seen) * self.restarts
        total = problems * sum(phase.search.iterations for phase in self.phases)
        seen = [explained(one, self.explanation) for one in seen]
        best, outcome = None, None
        with progress.task(self.title, total, "problem-steps") as task:
            for phase in self.phases:
                task.note("choosing how to run")
                ready = self._ready(phase, outcome, seen, seeds)
                task.note(str(ready.plan))
                found = self._search(phase, ready, seen[0], seeds, task)
                outcome = Outcome(ready.prior, ready.given, found)
                best = better(best, pictures_of(outcome, str(ready.plan)))
        assert best is not None
        return self._best_of_restarts(best)

    def _search(self, phase: Phase, ready: Prepared, one: Observation, seeds: Sequence[int], task: Task) -> Found:
        if isinstance(phase.search, PopulationSearch):
            drawn = [derive(seed, "population", r) for seed in seeds for r in range(self.restarts)]
            return phase.search.run(ready.evaluate, ready.starts, drawn, task)
        evaluate = pulled_together(ready.evaluate, self.restarts, self.consensus)

        def fresh(life: int) -> Params:
            return self._starts(one, ready.prior, seeds, life)

        return phase.search.run(evaluate, ready.starts, ready.prior.project, task, fresh)

    def prepare(self, seen: Sequence[Observation], seeds: Sequence[int]) -> Prepared:
        """Everything up to the first step: labels read, restarts drawn, and the way to step them together chosen."""
        attack = self._fitting(seen[0])
        return attack._ready(attack.phases[0], None, [explained(one, attack.explanation) for one in seen], seeds)

    def problems(self, seen: Sequence[Observation], seeds: Sequence[int]) -> tuple[dict[str, Batched], Params, Given]:
        """The ways to run the problems, their starting points and what is given of each, [observations * restarts]."""
        attack, phase = self._fitting(seen[0]), self.phases[0]
        seen = [explained(one, attack.explanation) for one in seen]
        prior, starts, given = attack._posed(phase, None, seen, seeds)
        return attack._ways(phase, seen[0], prior, starts, given), starts, given

    def _fitting(self, one: Observation) -> Matching:
        """The attack as it fits an observation: one step was taken at the broadcast, and nothing lies between."""
        if self.explanation == "surrogate" and local_steps(one) == 1:
            return replace(self, explanation="simulated")
        return self

    def _ready(
        self, phase: Phase, outcome: Outcome | None, seen: Sequence[Observation], seeds: Sequence[int]
    ) -> Prepared:
        prior, starts, given = self._posed(phase, outcome, seen, seeds)
        points, about = starts, given
        if isinstance(phase.search, PopulationSearch):
            points, about = for_population(starts, phase.search.together), for_population(given, phase.search.together)
        ways = self._ways(phase, seen[0], prior, points, about)
        plan = plan_for(ways, points, about, strategy=self.strategy, precision=self.precision)
        return Prepared(prior, given, starts, plan, bound(plan, ways[plan.way], points, about))

    def _posed(
        self, phase: Phase, outcome: Outcome | None, seen: Sequence[Observation], seeds: Sequence[int]
    ) -> tuple[Prior, Params, Given]:
        """The problems of a phase: what is searched, from where, and what is given."""
        prior = phase.prior(seen[0], outcome)
        given = self._given(seen, seeds) if outcome is None else outcome.given
        return prior, self._starts(seen[0], prior, seeds, 0), {**given, **prior.given()}

    def _starts(self, one: Observation, prior: Prior, seeds: Sequence[int], life: int) -> Params:
        """Where the restarts of each observation begin their n-th life; each seed alone decides its own."""
        size, device = one.batch_size or 1, next(iter(one.sent.values())).device
        rngs = [generator(seed, "restart", r, life) for seed in seeds for r in range(self.restarts)]
        starts = prior.starts(size, rngs)
        if self.labels == "searched":
            drawn = [torch.randn((size, one.domain.classes), generator=rng) for rng in rngs]
            starts["labels"] = torch.stack(drawn).to(device)
        if self.explanation == "surrogate":
            starts["mix"] = torch.full((len(rngs),), 0.5, device=device)
        return starts

    def _given(self, seen: Sequence[Observation], seeds: Sequence[int]) -> Given:
        """What each problem is about. Mini-batches depend on the order of the labels, so restarts try several."""
        one, size = seen[0], seen[0].batch_size or 1
        device = next(iter(one.sent.values())).device
        if self.objective is None:
            rngs = [generator(seed, "labels") for seed in seeds]
            drawn = [torch.randint(one.domain.classes, (size,), generator=rng) for rng in rngs]
            return {"labels": torch.stack(drawn).to(device).repeat_interleave(self.restarts, dim=0)}
        labels = _inferred(seen, size).repeat_interleave(self.restarts, dim=0)
        if one.recipe is not None and len(list(mini_batches(size, one.recipe))) > one.recipe.epochs:
            orders = [_order(size, generator(seed, "order", r), r) for seed in seeds for r in range(self.restarts)]
            labels = labels.gather(1, torch.stack(orders).to(device))
        given: Given = {"reply": stack([one.reply for one in seen])}
        if any(other.sent is not one.sent for other in seen):
            given["sent"] = stack([other.sent for other in seen])
        if self.aware:
            given |= estimated(seen)
        if self.counter is not None:
            given |= tree_map(lambda *tensors: torch.stack(tensors), *(self.counter.extra(one) for one in seen))
        if self.statistics and one.statistics is not None:
            given["statistics"] = stack([one.statistics or {} for one in seen])
        given["squares"] = squares(given["reply"])
        return {**for_population(given, self.restarts), "labels": labels}

    def _ways(self, phase: Phase, one: Observation, prior: Prior, starts: Params, given: Given) -> dict[str, Batched]:
        """Every way to run the problems; the joint one only where it gives what double backward gives."""
        alike = StatisticsPrior(one) if "statistics" in given else None

        def penalty(unknowns: Params, about: Given) -> Tensor:
            inputs, own = prior.decode(unknowns, about), prior.cost(unknowns)
            costs = [inputs.sum() * 0, *(weight * rule(inputs) for weight, rule in phase.regularisers)]
            if own is not None:
                costs.append(own)
            if alike is not None:
                costs.append(self.statistics * alike(inputs, about["statistics"]))
            return torch.stack(costs).sum()

        valued = isinstance(phase.search, PopulationSearch)
        if self.objective is None:
            if valued:
                return ways_of({"value": lambda unknowns, about: ({}, penalty(unknowns, about))}, None)
            return ways_of({"reverse": lambda unknowns, about: grad_and_value(penalty)(unknowns, about)}, None)
        problem = Problem(
            seen=one,
            prior=prior,
            targets=_searched if self.labels == "searched" else _read,
            loss=one.loss,
            objective=self.objective,
            penalty=penalty,
            distance=self._distance(one, self.objective),
            slopes=self._slopes(self.objective),
            treated=AsDefended() if self.aware and self.draws == 0 and self.counter is None else None,
            mixed=self.explanation == "surrogate",
            own_broadcasts="sent" in given,
        )
        singles = problem.values() if valued else problem.singles()
        plain = ways_of(singles, None)
        try:
            together = problem.joint_values() if valued else problem.joint()
            trusted = agree(together, plain[f"loop {list(singles)[-1]}"], starts, given)
        except UnsupportedError:
            return plain
        return ways_of(singles, together if trusted else None)

    def _distance(self, one: Observation, objective: Objective) -> Callable[[Params, Given], Tensor] | None:
        """What an adversary who thinks of the defense minimises; None for the plain objective."""
        averaged = Averaged(one, self.draws) if self.draws else None

        def distance(update: Params, given: Given) -> Tensor:
            def plain(candidate: Params) -> Tensor:
                if self.counter is not None:
                    return _informed(self.counter, objective, candidate, given)
                if not self.aware:
                    return objective(candidate, given["reply"])
                return objective(as_trusted(as_defended(candidate, given), given), as_trusted(given["reply"], given))

            return plain(update) if averaged is None else averaged(update, plain)

        return distance if self.aware or averaged or self.counter else None

    def _slopes(self, objective: Objective) -> Callable[[Params, Given], tuple[Params, Tensor]] | None:
        """The slope of the distance for all problems at once, where a counter-move is no more than what is given."""
        only_data = isinstance(self.counter, BatchedMoves) and self.counter.kind() is None
        return partial(_informed_slopes, objective) if only_data and not self.draws else None

    def _best_of_restarts(self, best: Pictures) -> list[Reconstruction]:
        objectives = best.objectives.view(-1, self.restarts)
        chosen = objectives.argmin(dim=1) + torch.arange(len(objectives), device=objectives.device) * self.restarts
        inputs = best.inputs[chosen].nan_to_num(0.5).clamp(0, 1).cpu()
        labels = best.labels[chosen].cpu()
        traces = best.trace[:, chosen].T.tolist()
        return [
            Reconstruction(
                inputs=inputs[i],
                labels=labels[i],
                objective=min(row),
                objectives=tuple(row),
                steps=best.steps,
                trace=tuple(traces[i]),
                stopped=best.stopped[int(chosen[i])],
                problem_steps=best.steps[-1] * self.restarts,
                strategy=best.strategy,
            )
            for i, row in enumerate(objectives.tolist())
        ]


def _inferred(seen: Sequence[Observation], size: int) -> Tensor:
    """The labels behind each reply, [N, size]: read broadcast by broadcast, for each is asked what it predicts."""
    members: dict[int, list[int]] = {}
    for i, one in enumerate(seen):
        members.setdefault(id(one.sent), []).append(i)
    found = torch.cat([infer_labels([seen[i] for i in same], size) for same in members.values()])
    order = torch.tensor([i for same in members.values() for i in same], device=found.device)
    return found[order.argsort()]


def _read(_unknowns: Params, given: Given) -> Tensor:
    labels: Tensor = given["targets"] if "targets" in given else given["labels"]
    return labels


def _informed(counter: CounterMove, objective: Objective, update: Params, given: Given) -> Tensor:
    """The distance of an update to the reply, of what a known defense left, and as much as it left."""
    own, reply = counter.pair(update, given["reply"])
    if "weights" in given:
        own, reply = (map_each(torch.mul, tree, given["weights"]) for tree in (own, reply))
    away = objective(own, reply)
    return given["confidence"] * away if "confidence" in given else away


def _informed_slopes(objective: Objective, updates: Params, given: Given) -> tuple[Params, Tensor]:
    """The slope of ``_informed`` and its value for updates [N, ...], by a counter-move that compares what was sent."""
    own, reply, weights = updates, given["reply"], given.get("weights")
    if weights is not None:
        own, reply = (map_each(torch.mul, tree, weights) for tree in (own, reply))
    slopes, away = objective.slopes(own, reply)
    if weights is not None:
        slopes = map_each(torch.mul, slopes, weights)
    if "confidence" not in given:
        return slopes, away
    sure = given["confidence"]
    return map_each(lambda slope: slope * sure.view(-1, *[1] * (slope.dim() - 1)), slopes), sure * away


def _searched(unknowns: Params, _given: Given) -> Tensor:
    return unknowns["labels"].softmax(dim=-1)


def _order(size: int, rng: torch.Generator, restart: int) -> Tensor:
    """The order in which a restart puts the labels: as they were found in every second one, shuffled in the others."""
    return torch.arange(size) if restart % 2 == 0 else torch.randperm(size, generator=rng)
