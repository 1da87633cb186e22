"""A study file: fields that every case shares and grids over others, expanded to cases with digests.

::

    kind: audit                      # or training; left out: audit
    base: {model: lenet, images: 2}  # fields of the case, as gradveil audit or gradveil train take them
    grid:                            # each field's values are crossed with those of the others
      defenses: [none, noise:sigma=0.1]
      recipe.lr: [0.1, 0.01]
    grids: [...]                     # several grids instead of one, one after another
    exclude: [{defenses: none, recipe.lr: 0.01}]
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
from gradveil.auditing.case import RESULTS
from gradveil.auditing.fields import first_complaint, read_fields
from gradveil.core.errors import GradveilError
from gradveil.federated import Training, make_training

Kind = Literal["audit", "training"]
_LISTS = frozenset({"attacks", "defenses", "observations", "tap", "training"})
"""Fields that hold several values: in a grid, one text is a list of one."""


@dataclass(frozen=True)
class Entry:
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
    entries: tuple[Entry, ...]
    threads: int = 1
    """Of torch, for each case: on some models their number changes the last digits, so it is not left to the runner."""
    together: int | None = None
    """At most so many cases are attacked as one batch; None: as many as the engine steps at once."""

    @property
    def on_gpu(self) -> bool:
        return any(entry.case.device == "cuda" for entry in self.entries)


Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]


class _File(BaseModel):
    """A study as a person writes it."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind = "audit"
    base: dict[str, Any] = {}
    grid: Grid = {}
    grids: list[Grid] = []
    exclude: list[dict[str, Any]] = []
    threads: int = Field(default=1, ge=1)
    together: int | None = Field(default=None, ge=1)


def read_study(path: Path) -> Study:
    """The study of a YAML file; what is wrong with it is said in one line."""
    return make_study(path.stem, read_fields(path, "study", "base: and grid: with lines below them"))


def make_study(name: str, fields: dict[str, Any]) -> Study:
    """A study from the fields of its file."""
    try:
        file = _File(**fields)
    except ValidationError as error:
        raise GradveilError(f"study {name}: {first_complaint(error, 'file')}") from None
    if file.grid and file.grids:
        raise GradveilError(f"study {name}: write either one grid: or several below grids:, not both")
    entries: dict[str, Entry] = {}
    for chosen in _combinations(file, name):
        entry = _entry(file, chosen, name)
        entries.setdefault(entry.digest, entry)
    if not entries:
        raise GradveilError(f"study {name}: exclude leaves no case")
    return Study(name, tuple(entries.values()), file.threads, file.together)


def _combinations(file: _File, name: str) -> Iterator[dict[str, Any]]:
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
            whole = file.base | chosen
            met = {at for at, rule in enumerate(file.exclude) if _meets(rule, whole)}
            used |= met
            if not met:
                yield chosen
    idle = next((rule for at, rule in enumerate(file.exclude) if at not in used), None)
    if idle is not None:
        shown = ", ".join(f"{field}: {_shown(value)}" for field, value in idle.items())
        raise GradveilError(f"study {name}: exclude {{{shown}}} meets no case: write its values as base or grid does")


def _meets(rule: dict[str, Any], case: dict[str, Any]) -> bool:
    return all(case.get(field) == value for field, value in rule.items())


def _entry(file: _File, chosen: dict[str, Any], name: str) -> Entry:
    title = " ".join(f"{field}={_shown(value)}" for field, value in chosen.items()) or name
    fields: dict[str, Any] = {}
    given = file.base | chosen
    for dotted, value in given.items():
        _put(fields, dotted.split("."), value, f"study {name}: {dotted}")
    _check_nothing_lost(list(given), name)
    fields |= {field: [fields[field]] for field in _LISTS & fields.keys() if isinstance(fields[field], str)}
    try:
        return Entry(file.kind, _case(file.kind, fields), title)
    except GradveilError as error:
        raise GradveilError(f"study {name}, case {title}: {error}") from None


def _case(kind: Kind, fields: dict[str, Any]) -> Case | ObservedCase | Training:
    if kind == "training":
        return make_training(fields)
    return make_observed_case(fields) if "observations" in fields else make_case(fields)


def _put(fields: dict[str, Any], path: list[str], value: Any, what: str) -> None:
    """Set a field, or a field within a field, without touching what the other cases share."""
    *above, last = path
    for part in above:
        inner = fields.get(part, {})
        if not isinstance(inner, dict):
            raise GradveilError(f"{what} is a field within {part}, but {part} is {inner!r}")
        fields[part] = fields = dict(inner)
    fields[last] = value


def _check_nothing_lost(given: list[str], name: str) -> None:
    """A field that is set as a whole after a field within it would take that back without a word."""
    for at, whole in enumerate(given):
        lost = next((before for before in given[:at] if before.startswith(f"{whole}.")), None)
        if lost is not None:
            raise GradveilError(f"study {name}: {whole} as a whole leaves nothing of {lost}: write that into {whole}")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
