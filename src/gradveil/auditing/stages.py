"""Stages: the saved exchanges of one round of one training, which become one row for each attack."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.attacks import ATTACKS
from gradveil.auditing.case import RESULTS, ObservedCase
from gradveil.auditing.exchange import Private
from gradveil.auditing.saved import Saved, Source, Truth
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.seeding import derive, generator
from gradveil.core.types import Batch
from gradveil.data import ImageSet
from gradveil.threat import Observation


@dataclass(frozen=True)
class Stage:
    """Exchanges that are attacked and scored together: all with their truth, or all without."""

    source: Source
    round_number: int | None
    files: tuple[Saved, ...]

    @property
    def title(self) -> str:
        return self.files[0].path.stem if self.round_number is None else f"round {self.round_number}"

    @property
    def seen(self) -> list[Observation]:
        return [one for file in self.files for one in file.seen]

    @property
    def clients(self) -> list[int]:
        return [file.client for file in self.files if file.client is not None]

    @property
    def truth(self) -> Truth | None:
        parts = [file.truth for file in self.files if file.truth is not None]
        if not parts:
            return None
        batch = Batch(torch.cat([p.batch.inputs for p in parts]), torch.cat([p.batch.labels for p in parts]))
        return Truth(batch, torch.cat([p.index for p in parts]))

    def client_of_each_image(self) -> list[int | None]:
        sizes = [(file, 0 if file.truth is None else len(file.truth.batch)) for file in self.files]
        return [file.client for file, size in sizes for _ in range(size)]

    def seeds(self, seed: int) -> list[int]:
        """By place in the stage: the searches of a later round start where those of an earlier one did."""
        return [derive(seed, "attack", i) for i in range(len(self.seen))]

    def module(self) -> nn.Module:
        """The model as it was broadcast."""
        module = copy.deepcopy(self.seen[0].module)
        module.load_state_dict(self.seen[0].sent, strict=False)
        return module


def stages_of(source: Source) -> list[Stage]:
    """By round, or by file where its name tells none; apart where the truth is missing."""
    groups: dict[tuple[object, ...], list[Saved]] = {}
    for file in source.files:
        when = file.path if file.round_number is None else file.round_number
        groups.setdefault((when, file.truth is None), []).append(file)
    return [Stage(source, files[0].round_number, tuple(files)) for files in groups.values()]


def every_picture_once(stages: Sequence[Stage]) -> Stage | None:
    """All exchanges with a truth as one stage, those with the same pictures only once: what chance is measured on."""
    taken: dict[bytes, Saved] = {}
    for file in (file for stage in stages for file in stage.files):
        if file.truth is not None:
            taken.setdefault(file.truth.batch.inputs.numpy().tobytes(), file)
    return Stage(stages[0].source, None, tuple(taken.values())) if taken else None


@dataclass(frozen=True)
class StageCell:
    """One attack on one stage, or the same search without the updates: what becomes a row."""

    case: ObservedCase
    attack: str
    stage: Stage
    prior_only: bool

    def digest(self) -> str:
        """The same for equal exchanges and plans, wherever the files lie."""
        case, pool = self.case, self.stage.source.data
        plan: dict[str, Any] = {
            "exchanges": [file.digest for file in self.stage.files],
            "distractors": pool or [file.digest for file in self.stage.source.files],
            "attack": self.attack,
            "prior_only": self.prior_only,
            "effort": asdict(case.effort()),
            "gallery": case.gallery,
            "seed": case.seed,
            "device": case.device,
            "results": RESULTS,
        }
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def cells_of(case: ObservedCase, sources: Sequence[Source]) -> list[StageCell]:
    """One cell per attack and stage, and after them one per attack for the prior alone, where it has one."""
    stages = [stage for source in sources for stage in stages_of(source)]
    crossed = [StageCell(case, attack, stage, False) for attack in case.attacks for stage in stages]
    chance = every_picture_once(stages)
    if chance is None:
        return crossed
    searching = [a for a in case.attacks if ATTACKS.build(a, case.effort()).prior_only() is not None]
    return crossed + [StageCell(case, attack, chance, True) for attack in searching]


def private_of(stage: Stage, truth: Truth, case: ObservedCase, data: ImageSet | None) -> Private:
    """The private examples of a stage in a gallery of others of their kind.

    Others come from ``data``, which the training names or, where nothing says what it was, from the other exchanges.
    """
    own, count = truth.batch.inputs, case.gallery + len(truth.batch)
    others = _other_pictures(stage, count, case.seed, data)
    apart = torch.cdist(others.flatten(1), own.flatten(1), compute_mode="donot_use_mm_for_euclid_dist").amin(dim=1) > 0
    gallery = torch.cat([own, others[apart][: max(0, case.gallery - len(own))]])
    if len(gallery) < 2:
        raise GradveilError(
            f"{stage.files[0].path} is alone with its picture: to identify it takes others of its kind, "
            "from more exchanges or from the data set that a train.json beside taps/ names"
        )
    return Private(truth.batch, truth.index, gallery)


def _other_pictures(stage: Stage, count: int, seed: int, data: ImageSet | None) -> Tensor:
    """At most so many pictures [m, C, H, W] of the same kind."""
    source, rng = stage.source, generator(seed, "gallery")
    if data is None:
        known = [file.truth.batch.inputs for file in source.files if file.truth is not None]
        every: Tensor = torch.unique(torch.cat(known), dim=0)
        return every[torch.randperm(len(every), generator=rng)[:count]]
    if data.domain.shape != stage.seen[0].domain.shape:
        raise BadFileError(f"{source.folder}: its train.json names {source.data}, which has other pictures")
    return data.batch(torch.randperm(len(data), generator=rng)[:count]).inputs
