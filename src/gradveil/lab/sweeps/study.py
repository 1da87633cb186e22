"""A study file: fields that every case shares and grids over others, expanded to cases with digests.

::

    kind: audit                      # or training; left out: audit
    base: {model: lenet, images: 2}  # fields of the case, as gradveil audit or gradveil train take them
    grid:                            # each field's values are crossed with those of the others
      defenses: [none, noise:sigma=0.1]
      recipe.lr: [0.1, 0.01]
    grids: [...]                     # several grids instead of one, one after another
    exclude: [{defenses: none, recipe.lr: 0.01}]

Cases whose clients answer the same broadcast are run as one batch, which the engine steps together. What is attacked
beside a case can change its last digits. So batches are made from the study alone, never from what is left of it to do,
and an interrupted batch is run again with the same cases in it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradveil.auditing import Case, ObservedCase, make_case, make_observed_case
from gradveil.auditing.case import RESULTS, first_complaint, read_fields
from gradveil.auditing.run import TOGETHER
from gradveil.core.errors import GradveilError
from gradveil.core.plugins import refuse_unloaded_models
from gradveil.core.types import Json
from gradveil.defenses import DEFENSES
from gradveil.federated import Training, make_training

Kind = Literal["audit", "training"]
_LISTS = frozenset({"attacks", "defenses", "observations", "tap", "training"})
"""Fields that hold several values: in a grid, one text is a list of one."""


@dataclass(frozen=True)
class StudyEntry:
    """One case of a study."""

    kind: Kind
    case: Case | ObservedCase | Training
    title: str
    """What sets it apart from the others."""

    @cached_property
    def digest(self) -> str:
        """The same for equal cases, whatever study they are of."""
        plan = {"kind": self.kind, "case": self.case.as_json(), "results": RESULTS}
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """All cases of a study file, each once, and how they are run."""

    name: str
    entries: tuple[StudyEntry, ...]
    threads: int = 1
    """Of torch, for each case: on some models their number changes the last digits, so it is not left to the runner."""
    together: int | None = None
    """At most so many cases are attacked as one batch; None: as many as the engine steps at once."""

    @property
    def on_gpu(self) -> bool:
        return any(entry.case.device == "cuda" for entry in self.entries)


@dataclass(frozen=True)
class CaseBatch:
    """Cases that are run together, or one by itself."""

    entries: tuple[StudyEntry, ...]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()[:16]

    @cached_property
    def digests(self) -> list[str]:
        return [entry.digest for entry in self.entries]

    @property
    def alone(self) -> bool:
        return len(self.entries) == 1

    @property
    def on_gpu(self) -> bool:
        return self.entries[0].case.device == "cuda"

    def apart(self) -> list[CaseBatch]:
        """Every case by itself."""
        return [CaseBatch((entry,)) for entry in self.entries]


def batches_of(study: Study) -> list[CaseBatch]:
    """The study in batches, in the order of its cases.

    Cases share a batch if they differ in nothing but defenses, the first of which sends the same broadcast. A batch
    that would fill more than one of the engine's is cut: more cases would only wait for each other.
    """
    alike: dict[str, list[StudyEntry]] = {}
    for entry in study.entries:
        key = entry.digest
        if isinstance(entry.case, Case):
            fields = entry.case.as_json()
            first, *_ = fields.pop("defenses")
            key = json.dumps([fields, DEFENSES.reshaping(first)], sort_keys=True)
        alike.setdefault(key, []).append(entry)
    batches = []
    for same in alike.values():
        case, most = same[0].case, 1
        if isinstance(case, Case):
            problems = case.effort().restarts * (case.images // case.batch_size) * len(case.defenses)
            most = max(1, TOGETHER[case.device] // problems)
            most = most if study.together is None else min(study.together, most)
        batches += [CaseBatch(tuple(same[i : i + most])) for i in range(0, len(same), most)]
    return batches


Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]


class _File(BaseModel):
    """A study as a person writes it."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind = "audit"
    base: Json = {}
    grid: Grid = {}
    grids: list[Grid] = []
    exclude: list[Json] = []
    threads: int = Field(default=1, ge=1)
    together: int | None = Field(default=None, ge=1)


def read_study(path: Path) -> Study:
    """The study of a YAML file, which loads no code.

    Raises:
        GradveilError: with one line, if something is wrong with it.
    """
    fields = read_fields(path, "study", "base: and grid: with lines below them")
    refuse_unloaded_models(fields)
    return make_study(path.stem, fields)


def make_study(name: str, fields: Json) -> Study:
    """A study from the fields of its file."""
    try:
        file = _File(**fields)
    except ValidationError as error:
        raise GradveilError(f"study {name}: {first_complaint(error, 'file')}") from None
    if file.grid and file.grids:
        raise GradveilError(f"study {name}: write either one grid: or several below grids:, not both")
    entries: dict[str, StudyEntry] = {}
    case: Case | ObservedCase | Training
    for chosen in _combinations(file, name):
        title = " ".join(f"{field}={_shown(value)}" for field, value in chosen.items()) or name
        given = _nested(file.base | chosen, name)
        given |= {field: [given[field]] for field in _LISTS & given.keys() if isinstance(given[field], str)}
        try:
            if file.kind == "training":
                case = make_training(given)
            else:
                case = make_observed_case(given) if "observations" in given else make_case(given)
        except GradveilError as error:
            raise GradveilError(f"study {name}, case {title}: {error}") from None
        entry = StudyEntry(file.kind, case, title)
        entries.setdefault(entry.digest, entry)
    if not entries:
        raise GradveilError(f"study {name}: exclude leaves no case")
    return Study(name, tuple(entries.values()), file.threads, file.together)


def _combinations(file: _File, name: str) -> Iterator[Json]:
    """What the grids choose for each case, without what is excluded."""
    grids = file.grids or [file.grid]
    known = {field for grid in grids for field in grid} | file.base.keys()
    unknown = next((field for rule in file.exclude for field in rule if field not in known), None)
    if unknown is not None or {} in file.exclude:
        raise GradveilError(f"study {name}: exclude names fields of base or grid, not {unknown or 'nothing'}")
    used: set[int] = set()
    for grid in grids:
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            case = file.base | chosen
            met = {
                at
                for at, rule in enumerate(file.exclude)
                if all(case.get(field) == value for field, value in rule.items())
            }
            used |= met
            if not met:
                yield chosen
    idle = next((rule for at, rule in enumerate(file.exclude) if at not in used), None)
    if idle is not None:
        shown = ", ".join(f"{field}: {_shown(value)}" for field, value in idle.items())
        raise GradveilError(f"study {name}: exclude {{{shown}}} meets no case: write its values as base or grid does")


def _nested(given: Json, name: str) -> Json:
    """Fields with those that have dots in their names put into the fields that they are part of."""
    nested: Json = {}
    for dotted, value in given.items():
        *above, last = dotted.split(".")
        place = nested
        for part in above:
            inner = place.get(part, {})
            if not isinstance(inner, dict):
                raise GradveilError(f"study {name}: {dotted} is a field within {part}, but {part} is {inner!r}")
            place[part] = place = dict(inner)  # a copy: other cases share what is in the base
        place[last] = value
    for at, whole in enumerate(given):
        lost = next((before for before in list(given)[:at] if before.startswith(f"{whole}.")), None)
        if lost is not None:  # a field that is set as a whole would silently drop what was set within it
            raise GradveilError(f"study {name}: {whole} as a whole leaves nothing of {lost}: write that into {whole}")
    return nested


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
