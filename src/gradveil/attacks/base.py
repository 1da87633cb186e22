"""What an attack is: many observations in, one reconstruction each out. It never sees, and cannot name, the truth.

Reconstructions on disk: one file holds those of one attack, in the order of what it saw.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, final, overload

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.updates import as_gradient
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.fields import Json
from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import Registry
from gradveil.core.tensor_files import Shapes, read_tensors, write_tensors
from gradveil.core.types import Batch, Params
from gradveil.domains import Domain
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

_KIND = "reconstruction"


@dataclass(frozen=True)
class Budget:
    """How hard an attack tries where its own options do not say: independent restarts, and iterations of each."""

    restarts: int
    iterations: int

    def __post_init__(self) -> None:
        if self.restarts < 1 or self.iterations < 1:
            raise GradveilError("an attack needs at least one restart and one iteration")


BUDGETS = {"quick": Budget(2, 600), "standard": Budget(2, 1600), "thorough": Budget(8, 8000)}


@dataclass(frozen=True)
class Reconstruction:
    """What an attack believes the private batch was, and how it came to believe it."""

    inputs: Tensor
    """[B, ...], of the domain."""
    labels: Tensor
    """[B] of int64."""
    objective: float
    """The attack's own objective of the restart it chose; infinity if every restart diverged."""
    objectives: tuple[float, ...]
    """The own objective of every restart."""
    steps: tuple[int, ...]
    """Iterations at which ``trace`` was read."""
    trace: tuple[float, ...]
    """The own objective of the chosen restart at those iterations."""
    stopped: str
    """Why the search ended: budget, converged, stuck or diverged."""
    problem_steps: int = 0
    """Iterations times restarts that this reconstruction took."""
    strategy: str = ""
    """How the engine ran it."""
    candidates: str = ""
    """The name of the data set that was chosen from, where the attack chose."""
    scores: Tensor | None = None
    """[m]: how badly each of those candidates explains the update, in the order of the data set; lower is better."""

    @classmethod
    def closed_form(cls, inputs: Tensor, labels: Tensor, objective: float, *, stopped: str = "converged") -> Self:
        """What was computed without a search: one value of the objective, no steps."""
        values = (objective,)
        return cls(inputs.cpu(), labels.cpu(), objective, values, (0,), values, stopped, strategy="closed form")


@dataclass(frozen=True)
class Crafted:
    """What a dishonest server broadcasts instead of the honest model."""

    module: nn.Module
    """The architecture it sends; parameters are those of ``sent``."""
    model: str
    """The spec that builds this architecture."""
    sent: Params
    tampered: tuple[str, ...]
    """Names of the parameters that the server changed or added."""


@dataclass(frozen=True)
class Server:
    """What a dishonest server holds before it crafts: the honest broadcast, and public data if it has any."""

    module: nn.Module
    model: str
    sent: Params
    domain: Domain
    public: Batch | None = None


class Attack(ABC):
    """Base of all attacks. Subclasses write ``run``; calling the attack checks what goes in and what comes out."""

    requires: ClassVar[frozenset[Knowledge]] = frozenset()

    def kind_of(self, one: Observation) -> Hashable:  # noqa: ARG002
        """What keeps observations apart beside their model: those of different kinds are never attacked together."""
        return None

    @property
    def problems_each(self) -> int:
        """How many problems one observation makes, such as one for each restart."""
        return 1

    @property
    def across_broadcasts(self) -> bool:
        """Whether ``run`` takes replies to different broadcasts of one architecture, such as of several rounds."""
        return False

    @property
    def crafts(self) -> bool:
        """Whether the attack needs a broadcast of its own making: then ``craft`` says what clients are sent."""
        return Knowledge.CRAFT in self.requires

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:  # noqa: ARG002
        """What to send one client next, after its replies so far; None when there is nothing more to ask.

        Only called for attacks that craft. The last reply becomes the observation that ``run`` gets, with the others
        in its ``earlier``.
        """
        return None

    @overload
    def __call__(
        self, seen: Observation, *, seeds: Sequence[int] | None = ..., progress: Progress = ...
    ) -> Reconstruction: ...

    @overload
    def __call__(
        self, seen: Sequence[Observation], *, seeds: Sequence[int] | None = ..., progress: Progress = ...
    ) -> list[Reconstruction]: ...

    @final
    def __call__(
        self,
        seen: Observation | Sequence[Observation],
        *,
        seeds: Sequence[int] | None = None,
        progress: Progress = SILENT,
    ) -> Reconstruction | list[Reconstruction]:
        """Attack one observation, or each of several; ``seeds[i]`` alone decides the random draws for ``seen[i]``.

        Args:
            seen: What the adversary saw. Observations that share a model and a broadcast are attacked together.
            seeds: As many as there are observations; by default 0, 1 and so on.
            progress: Where the attack reports how far it is.

        Returns:
            One reconstruction, or a list of as many as there are observations.
        """
        if isinstance(seen, Observation):
            return self([seen], seeds=seeds, progress=progress)[0]
        seeds = range(len(seen)) if seeds is None else seeds
        if len(seen) != len(seeds):
            raise GradveilError(f"{len(seen)} observations need as many seeds, not {len(seeds)}")
        seen = [as_gradient(one) for one in seen]
        alike: dict[tuple[object, ...], list[int]] = {}
        for i, one in enumerate(seen):
            sent = None if self.across_broadcasts else id(one.sent)
            chooses = Knowledge.CANDIDATES in self.requires
            alone = (sent, id(one.module), id(one.candidates) if chooses else None)
            key = (self.kind_of(one), *alone, one.kind, one.batch_size, one.recipe)
            alike.setdefault(key, []).append(i)
        found: dict[int, Reconstruction] = {}
        for members in alike.values():
            group = self.run([seen[i] for i in members], seeds=[seeds[i] for i in members], progress=progress)
            found.update(zip(members, group, strict=True))
        for i, one in enumerate(seen):
            _verify(found[i], one)
        return [found[i] for i in range(len(seen))]

    @abstractmethod
    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> Sequence[Reconstruction]:
        """Attack observations that share the model and, unless it goes across them, the broadcast."""

    def prior_only(self) -> Attack | None:
        """The same search without the update: what chance looks like for this attack. None where it makes no sense."""
        return None


class AttackRegistry(Registry[Attack]):
    """Attacks by name. A registered attack is a class or a function whose keyword-only arguments are its options."""

    def build(self, spec: str, *context: Any) -> Attack:
        """The attack of a spec. A budget, if given, goes to attacks that take a ``budget``."""
        name, options = self.parse(spec)
        parameters = inspect.signature(self.get(name)).parameters
        takes = any(parameter.strip("_") == "budget" for parameter in parameters)
        return self.make(name, (context or (BUDGETS["standard"],)) if takes else (), options)


ATTACKS = AttackRegistry("attack", base=Attack, group="gradveil.attacks")


def _verify(found: Reconstruction, seen: Observation) -> None:
    """A reconstruction is of the domain, with one label each within the classes."""
    fault = seen.domain.fault(found.inputs)
    if fault is not None:
        raise GradveilError(f"the attack returned {fault}")
    if found.labels.shape != (len(found.inputs),):
        raise GradveilError(f"the attack returned labels of shape {tuple(found.labels.shape)}")
    if int(found.labels.min()) < 0 or int(found.labels.max()) >= seen.domain.classes:
        raise GradveilError("the attack returned a label that is no class")


def save_reconstructions(path: Path, found: Sequence[Reconstruction]) -> None:
    """Inputs [n, ...] and labels [n] of all batches one after the other, scores of candidates [batches, m].

    Everything else is in the header, with None for infinities, which JSON lacks.
    """
    tensors = {"inputs": torch.cat([f.inputs for f in found]), "labels": torch.cat([f.labels for f in found])}
    scores = [f.scores for f in found if f.scores is not None]
    if scores:
        tensors["scores"] = torch.stack(scores)
    facts = [
        {key: value for key, value in vars(f).items() if key not in ("inputs", "labels", "scores")}
        | {"objective": finite_or_none(f.objective)}
        | {key: [finite_or_none(value) for value in getattr(f, key)] for key in ("objectives", "trace")}
        for f in found
    ]
    write_tensors(path, _KIND, tensors, {"sizes": [len(f.inputs) for f in found], "facts": facts})


def load_reconstructions(path: Path) -> list[Reconstruction]:
    """The reconstructions of a file, checked."""

    def check(meta: Json, shapes: Shapes) -> None:
        sizes = meta.get("sizes")
        whole = isinstance(sizes, list) and all(type(size) is int and size >= 1 for size in sizes)
        inputs, scores = shapes.get("inputs", ()), shapes.get("scores")
        good = whole and len(inputs) >= 2 and shapes.get("labels") == (sum(sizes or []),) == inputs[:1]
        good = good and (scores is None or (len(scores), scores[0]) == (2, len(sizes or [])))
        if not good or not isinstance(meta.get("facts"), list):
            raise BadFileError(f"{path} does not hold as many pictures and labels as its header says")

    def number(value: float | None) -> float:
        return float("inf") if value is None else float(value)

    tensors, meta = read_tensors(path, _KIND, check=check)
    inputs, labels = torch.split(tensors["inputs"], meta["sizes"]), torch.split(tensors["labels"], meta["sizes"])
    scores = tensors.get("scores", [None] * len(meta["sizes"]))
    found = []
    try:
        for x, y, each, fact in zip(inputs, labels, scores, meta["facts"], strict=True):
            if not all(isinstance(fact.get(key, ""), str) for key in ("stopped", "strategy", "candidates")):
                raise TypeError("a word in it is no text")
            lists = {key: tuple(map(number, fact[key])) for key in ("objectives", "trace")}
            facts = {**fact, **lists, "objective": number(fact["objective"]), "steps": tuple(fact["steps"])}
            found.append(Reconstruction(inputs=x, labels=y, scores=each, **facts))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadFileError(f"{path}: its header is impossible: {error!r}") from None
    return found


def finite_or_none(value: float) -> float | None:
    """The value, or None for NaN and infinity."""
    return value if -float("inf") < value < float("inf") else None
