"""Gradient matching: search for the inputs whose update is nearest to the observed one.

An attack of this family is a composition: labels read or searched, objective, regularisers, and one or more phases,
each a search over some prior: pixels, the code of a generator, its weights. Restarts are an axis of the batch of
problems; the best one is chosen by the attack's own objective.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from gradveil.attacks.base import BUDGETS, Attack, Budget, Reconstruction
from gradveil.attacks.parts.channel import Adjustment, Estimated, cut_tensors
from gradveil.attacks.parts.counter import Averaged, Averages
from gradveil.attacks.parts.labels import infer_labels
from gradveil.attacks.parts.objectives import Objective, Regulariser
from gradveil.attacks.parts.priors import Pixels, Prior
from gradveil.attacks.parts.problem import Problem, StatisticsRule, UpdateDistance, batch_norm_distance
from gradveil.attacks.parts.search import Found, Problems, Search
from gradveil.attacks.parts.updates import Explanation, explained
from gradveil.client.local import mini_batches
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress, Task
from gradveil.core.seeding import derive, generator
from gradveil.core.trees import stack
from gradveil.core.types import Params
from gradveil.domains import Domain
from gradveil.engine import Batched, Evaluate, Given, Precision, Strategy, bound, plan_for, ways_of
from gradveil.engine.products import squares
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

Pruned = Literal["sent", "anew"]
"""What is left of a candidate where an update was sparsified: the entries that were sent, or as many of its own, the
largest."""


@dataclass(frozen=True)
class PhaseResult(Found):
    """What a phase found, as inputs. The next phase starts from it."""

    prior: Prior
    inputs: Tensor
    """[N, B, ...]."""
    labels: Tensor
    """[N, B]."""
    strategy: str
    """How it was run."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One search: how, and over what. The prior is made from what the phase before found, which is None at first."""

    search: Search
    prior: Callable[[Observation, PhaseResult | None], Prior]
    regularisers: tuple[tuple[float, Regulariser], ...] = ()


def over_pixels(*, free: bool = False) -> Callable[[Observation, PhaseResult | None], Prior]:
    """The pixels themselves are searched; ``free`` ones may leave [0, 1] on the way."""
    return lambda one, _: Pixels(one.domain, next(iter(one.sent.values())).device, free=free)


@dataclass(frozen=True)
class Matching(Attack):
    """Search the inputs by matching updates. A subclass is one attack: fields are its options, ``phases`` its searches.

    Options that only some attacks have are plain attributes here; an attack that has one declares it as a field.
    """

    budget: Budget = BUDGETS["standard"]
    """How hard it tries where its own options do not say."""
    adjustment: Adjustment | None = None
    """What is taken into account of a known defense."""
    without_update: bool = False
    """The prior alone: the same search, no update."""
    _: KW_ONLY
    iterations: int | None = None
    restarts: int | None = None
    match: Explanation = "simulated"
    strategy: Strategy = "auto"
    precision: Precision = "float32"

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})
    searches_labels = False
    """Labels are unknowns of the search like the pixels (DLG), not read off the last layer's gradient before it."""
    consensus = 0.0
    """Weight of the squared distance of each restart to the mean of all restarts (group consistency)."""
    statistics = 0.0
    """Weight of the batch-norm statistics, where the threat model gives them."""
    aware = False
    """Estimate from the update what a defense did to it, and do the same to candidates."""
    pruned: Pruned = "sent"
    draws = 0
    """Average over so many draws of a known random defense (EOT); 0: take the update as it is."""
    averaged: Averages = "distances"
    registered = False
    """Restarts are shifted onto each other before their mean is taken."""
    statistics_rule: StatisticsRule = "squared"

    @property
    @abstractmethod
    def title(self) -> str:
        """What progress is reported under."""

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """How far apart two updates are."""

    @property
    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Searches one after the other; each problem keeps the best of all by its own objective."""

    def __post_init__(self) -> None:
        # phases are composed here so that a search with impossible options is refused before the attack runs
        if self.problems_each < 1 or not self.phases:
            raise GradveilError("an attack needs at least one restart and one iteration")

    @property
    def steps(self) -> int:
        """Iterations of each restart, of all phases together."""
        return self.iterations or self.budget.iterations

    @property
    def problems_each(self) -> int:
        return self.restarts or self.budget.restarts

    @property
    def across_broadcasts(self) -> bool:
        return self.draws == 0 and (self.statistics == 0 or self.without_update)

    def prior_only(self) -> Attack | None:
        return replace(self, without_update=True)

    def kind_of(self, one: Observation) -> Hashable:
        cut = self.aware and not self.without_update and bool(cut_tensors(one.reply))
        return one.defense if self.draws else None, cut  # the gradients of others need not be formed

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        phases, found = self.phases, list[PhaseResult]()
        title = f"{self.title} without the update" if self.without_update else self.title
        total = len(seen) * self.problems_each * sum(phase.search.iterations for phase in phases)
        with progress.task(title, total) as task:
            task.note("choosing how to run")
            batch = _Batch(self, seen, seeds)
            for phase in phases:
                found.append(batch.solved(phase, found[-1] if found else None, task))
        return self._best(found, seen[0].domain)

    def prepare(self, seen: Sequence[Observation], seeds: Sequence[int]) -> Problems:
        """Everything up to the first step: labels read, restarts drawn, and the way to step them together chosen."""
        batch, phase = _Batch(self, seen, seeds), self.phases[0]
        return batch.ready(phase, *batch.posed(phase, None))

    def problems(self, seen: Sequence[Observation], seeds: Sequence[int]) -> tuple[dict[str, Batched], Params, Given]:
        """The ways to run the problems, their starting points and what is given of each, [observations * restarts]."""
        batch, phase = _Batch(self, seen, seeds), self.phases[0]
        prior, starts, given = batch.posed(phase, None)
        return batch.ways(phase, prior, starts, given), starts, given

    def _best(self, phases: Sequence[PhaseResult], domain: Domain) -> list[Reconstruction]:
        """Of each observation the best restart in its best phase, by the attack's own objective."""
        lowest, phase = torch.stack([found.objectives for found in phases]).min(dim=0)
        rows = lowest.view(-1, self.problems_each)
        chosen = rows.argmin(dim=1) + torch.arange(len(rows), device=rows.device) * self.problems_each
        best, each = phase[chosen], torch.arange(len(chosen), device=rows.device)
        inputs = domain.valid(torch.stack([found.inputs[chosen] for found in phases])[best, each]).cpu()
        labels = torch.stack([found.labels[chosen] for found in phases])[best, each].cpu()
        traces, steps = torch.cat([found.trace[:, chosen] for found in phases]).T.tolist(), tuple[int, ...]()
        for found in phases:
            steps += tuple((steps[-1] if steps else 0) + step for step in found.steps)
        return [
            Reconstruction(
                inputs=inputs[i],
                labels=labels[i],
                objective=min(row),
                objectives=tuple(row),
                steps=steps,
                trace=tuple(traces[i]),
                stopped=phases[int(best[i])].stopped[int(chosen[i])],
                problem_steps=steps[-1] * self.problems_each,
                strategy="; ".join(found.strategy for found in phases),
            )
            for i, row in enumerate(rows.tolist())
        ]


class _Batch:
    """The problems of one attack on some observations: the restarts of each, one after the other."""

    def __init__(self, attack: Matching, seen: Sequence[Observation], seeds: Sequence[int]) -> None:
        self.attack, self.seeds, self.restarts = attack, seeds, attack.problems_each
        self.seen = [explained(one, attack.match) for one in seen]
        self.mixed = attack.match == "surrogate" and self.seen[0] is not seen[0]
        self.searches_labels = attack.searches_labels and not attack.without_update
        self.size = self.seen[0].batch_size or 1
        self.device = next(iter(self.seen[0].sent.values())).device
        self.adjustment = attack.adjustment or (
            Estimated(anew=attack.pruned == "anew") if attack.aware else Adjustment()
        )
        self.given = self._labels() if attack.without_update else self._given()

    def solved(self, phase: Phase, before: PhaseResult | None, task: Task) -> PhaseResult:
        """The best point of each problem in one phase."""
        prior, starts, given = self.posed(phase, before)
        problems = self.ready(phase, prior, starts, given)
        task.note(str(problems.plan))
        found = phase.search.run(problems, task)
        return PhaseResult(
            **vars(found),
            prior=prior,
            inputs=vmap(prior.decode)(found.unknowns, given),
            labels=found.unknowns["labels"].argmax(dim=-1) if self.searches_labels else given["labels"],
            strategy=str(problems.plan),
        )

    def posed(self, phase: Phase, before: PhaseResult | None) -> tuple[Prior, Params, Given]:
        """The problems of a phase: what is searched, from where, and what is given."""
        prior = phase.prior(self.seen[0], before)
        return prior, self._starts(prior, 0), {**self.given, **prior.given()}

    def ready(self, phase: Phase, prior: Prior, starts: Params, given: Given) -> Problems:
        """The problems of a phase with the way to step them chosen."""
        attack, population = self.attack, phase.search.population
        points, about = _repeated(starts, population), _repeated(given, population)
        ways = self.ways(phase, prior, points, about)
        plan = plan_for(ways, points, about, strategy=attack.strategy, precision=attack.precision)
        evaluate = bound(plan, ways[plan.way], points, about)
        return Problems(
            evaluate=with_group_consistency(evaluate, self.restarts, attack.consensus, registered=attack.registered),
            start=starts,
            project=self._between(prior.project) if self.mixed else prior.project,
            fresh=lambda life: self._starts(prior, life),
            seeds=[derive(seed, "population", r) for seed in self.seeds for r in range(self.restarts)],
            plan=plan,
        )

    def ways(self, phase: Phase, prior: Prior, starts: Params, given: Given) -> dict[str, Batched]:
        """Every way to run the problems; the joint one only where it gives what double backward gives."""
        attack, one, values_only = self.attack, self.seen[0], phase.search.population > 1
        distance = None
        if not attack.without_update:
            averaged = Averaged(one, attack.draws, attack.averaged) if attack.draws else None
            distance = UpdateDistance(attack.objective, self.adjustment, averaged)
        problem = Problem(
            seen=one,
            prior=prior,
            distance=distance,
            regularisers=phase.regularisers,
            statistics=batch_norm_distance(one, attack.statistics, attack.statistics_rule)
            if "statistics" in given
            else None,
            searches_labels=self.searches_labels,
            mixed=self.mixed,
        )
        singles = problem.singles(values_only=values_only)
        own_weights = "sent" in given or not problem.one_gradient  # of each problem
        joint = None if own_weights else partial(problem.joint, values_only=values_only)
        return ways_of(singles, joint, starts, given)

    def _starts(self, prior: Prior, life: int) -> Params:
        """Where the restarts of each observation begin their n-th life; each seed alone decides its own."""
        rngs = [generator(seed, "restart", r, life) for seed in self.seeds for r in range(self.restarts)]
        starts = prior.starts(self.size, rngs)
        if self.searches_labels:
            drawn = [torch.randn((self.size, self.seen[0].domain.classes), generator=rng) for rng in rngs]
            starts["labels"] = torch.stack(drawn).to(self.device)
        if self.mixed:
            starts["mix"] = torch.full((len(rngs),), 0.5, device=self.device)
        return starts

    @staticmethod
    def _between(project: Callable[[Params], Params]) -> Callable[[Params], Params]:
        """The gradient is taken between the first and the last parameters, never beyond them."""
        return lambda unknowns: {**project(unknowns), "mix": unknowns["mix"].clamp(0, 1)}

    def _labels(self) -> Given:
        """Labels drawn without the update."""
        rngs = [generator(seed, "labels") for seed in self.seeds]
        drawn = [torch.randint(self.seen[0].domain.classes, (self.size,), generator=rng) for rng in rngs]
        return {"labels": _repeated(torch.stack(drawn).to(self.device), self.restarts)}

    def _given(self) -> Given:
        """What each problem is about."""
        attack, seen, one = self.attack, self.seen, self.seen[0]
        labels: Tensor = _repeated(infer_labels(seen, self.size), self.restarts)
        if one.recipe is not None and len(list(mini_batches(self.size, one.recipe))) > one.recipe.epochs:
            # mini-batches depend on the order of the labels: every second restart tries another one
            orders = [
                torch.randperm(self.size, generator=generator(seed, "order", r)) if r % 2 else torch.arange(self.size)
                for seed in self.seeds
                for r in range(self.restarts)
            ]
            labels = labels.gather(1, torch.stack(orders).to(self.device))
        given: Given = {"reply": stack([other.reply for other in seen])}
        if any(other.sent is not one.sent for other in seen):
            given["sent"] = stack([other.sent for other in seen])
        given |= self.adjustment.extra(seen)
        if attack.statistics and one.statistics is not None:
            given["statistics"] = stack([other.statistics or {} for other in seen])
        given["squares"] = squares(given["reply"])
        return {**_repeated(given, self.restarts), "labels": labels}


def with_group_consistency(evaluate: Evaluate, restarts: int, weight: float, *, registered: bool = False) -> Evaluate:
    """The group prior of GradInversion: the restarts of one update look for the same image.

    The same problems, ``restarts`` in a row of each update, with their mean squared distance to their mean added. A
    mean over pixels, not a sum: the matching is a share of the update's square, which a sum over pixels would drown.
    ``registered`` restarts are shifted onto their mean before the mean is taken that they are pulled to.
    """
    if weight == 0 or restarts == 1:
        return evaluate

    def pulled(point: Params) -> tuple[Params, Tensor]:
        gradients, values = evaluate(point)
        each = point["pixels"].view(-1, restarts, *point["pixels"].shape[1:])
        mean = each.mean(dim=1, keepdim=True)
        if registered and each.dim() == 6:  # of images; nothing else can be shifted
            mean = shifted_onto(each, mean).mean(dim=1, keepdim=True)
        away = (each - mean).flatten(0, 1)
        cost = weight * away.square().flatten(1).mean(dim=1)
        pull = 2 * weight / away[0].numel() * away
        return {**gradients, "pixels": gradients["pixels"] + pull}, values + cost

    return pulled


def shifted_onto(images: Tensor, target: Tensor) -> Tensor:
    """Images [..., C, H, W], each moved by the whole pixels, an eighth of its side at most, at which it fits best.

    GradInversion registers by features and homographies; a shift is what its restarts mostly differ by.
    """
    height, width = images.shape[-2:]
    product = torch.fft.rfft2(target) * torch.fft.rfft2(images).conj()
    fits = torch.fft.irfft2(product.sum(dim=-3), s=(height, width))
    rows, columns = (torch.arange(side, device=images.device) for side in (height, width))
    near = [torch.minimum(places, len(places) - places) <= len(places) // 8 for places in (rows, columns)]
    best = fits.masked_fill(~(near[0][:, None] & near[1]), -torch.inf).flatten(-2).argmax(dim=-1)[..., None, None]
    down, across = (rows - best[..., 0] // width) % height, (columns - best[..., 0] % width) % width
    place = (down[..., :, None] * width + across[..., None, :]).flatten(-2)[..., None, :]
    return images.flatten(-2).gather(-1, place.expand(*images.shape[:-2], -1)).view_as(images)


def _repeated(tree: Any, times: int) -> Any:
    """Everything [N, ...] with each entry so many times in a row, [N * times, ...]."""
    return tree if times == 1 else tree_map(lambda tensor: tensor.repeat_interleave(times, dim=0), tree)
