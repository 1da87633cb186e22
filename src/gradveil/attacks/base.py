"""What an attack is: many observations in, one reconstruction each out. It never sees, and cannot name, the truth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.updates import as_gradient
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import Registry
from gradveil.core.types import Batch, Domain, Params
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation


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
    """[B, C, H, W] in [0, 1]."""
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

    @final
    def __call__(
        self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress = SILENT
    ) -> list[Reconstruction]:
        """Attack each observation; ``seeds[i]`` alone decides the random draws for ``seen[i]``."""
        if len(seen) != len(seeds):
            raise GradveilError(f"{len(seen)} observations need as many seeds, not {len(seeds)}")
        seen = [as_gradient(one) for one in seen]
        found: dict[int, Reconstruction] = {}
        for members in _alike(seen, self):
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


ATTACKS: Registry[Attack] = Registry("attack")


def _alike(seen: Sequence[Observation], attack: Attack) -> list[list[int]]:
    """Positions of observations that can be attacked together: the same kind, model and private shapes."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, one in enumerate(seen):
        sent = None if attack.across_broadcasts else id(one.sent)
        key = (attack.kind_of(one), sent, id(one.module), one.kind, one.batch_size, one.recipe)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _verify(found: Reconstruction, seen: Observation) -> None:
    """A reconstruction has the shape of the inputs, one label each within the classes, and stays inside [0, 1]."""
    count = len(found.inputs)
    if found.inputs.shape != (count, *seen.domain.shape) or found.labels.shape != (count,):
        raise GradveilError(f"the attack returned inputs of shape {tuple(found.inputs.shape)}")
    if not bool(torch.isfinite(found.inputs).all()) or found.inputs.min() < 0 or found.inputs.max() > 1:
        raise GradveilError("the attack returned pixels outside [0, 1]")
    if int(found.labels.min()) < 0 or int(found.labels.max()) >= seen.domain.classes:
        raise GradveilError("the attack returned a label that is no class")
