"""What is audited: a case as a person writes it, in a YAML file or with options, and the digests of its rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gradveil import models
from gradveil.attacks import ATTACKS, BUDGETS, Budget
from gradveil.core.errors import GradveilError
from gradveil.core.fields import Json
from gradveil.core.reading import read_text
from gradveil.core.types import Recipe
from gradveil.data import DATASETS
from gradveil.defenses import DEFENSES
from gradveil.threat import threat_model

RESULTS = 5
"""Raised when a change of the code changes results, so that saved rows of older code are not taken for new ones."""
LARGEST_FILE = 2**20

BudgetName = Literal["quick", "standard", "thorough"]
Device = Literal["cpu", "cuda"]


def distinct(kind: str, specs: Sequence[str]) -> tuple[str, ...]:
    """The specs, none of which may stand twice."""
    if len(set(specs)) < len(specs):
        raise GradveilError(f"{kind} {max(specs, key=specs.count)!r} stands twice in the case")
    return tuple(specs)


def _known_attacks(specs: tuple[str, ...]) -> tuple[str, ...]:
    return distinct("attack", [ATTACKS.canonical(spec) for spec in specs])


Attacks = Annotated[tuple[str, ...], AfterValidator(_known_attacks)]
"""None named: those of the suite that the budget, the threat model and the case choose."""


class Case(BaseModel):
    """One audit: private data, model, recipe, adversary, and the defenses and attacks to cross."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)  # the help of options

    data: str = "cifar10-samples"
    """Private data, such as cifar10-samples."""
    model: str = "lenet:init=wide"
    """Model, such as lenet:init=wide, or pkg.module:factory."""
    defenses: tuple[str, ...] = ("none", "noise:sigma=0.1")
    """Defense, such as noise:sigma=0.1, or pkg.module:Class. Repeatable."""
    attacks: Attacks = ()
    """Attack, such as ig:tv=0.01, or pkg.module:Class. Repeatable; default: the suite that the budget names."""
    threat: str = "D"
    """Threat model A to H, with extras as in C+labels."""
    images: int = Field(default=4, ge=1)
    """How many private images."""
    every: int = Field(default=1, ge=1)
    """Take every k-th image of the data set, from its first."""
    batch_size: int = Field(default=1, ge=1)
    """Private images behind one update."""
    recipe: Recipe = Recipe()
    restarts: int | None = Field(default=None, ge=1)
    """Restarts of each attack; default: as the budget says."""
    budget: BudgetName = "standard"
    """quick, standard or thorough: how many attacks, and how hard they try."""
    gallery: int = Field(default=100, ge=2)
    """Pictures to pick the private one out of."""
    seed: int = Field(default=0, ge=0)
    """All random draws derive from it."""
    training: tuple[str, ...] = ()
    """Read what a defense costs off this gradveil train folder; one has to be without a defense. Repeatable."""
    device: Device = "cpu"
    """cpu or cuda; default: cuda if available."""
    unfit: Literal["refuse", "leave out"] = "refuse"
    """What becomes of defenses that cannot work on the model: the audit refuses to start, or goes on without them."""

    @field_validator("data")
    @classmethod
    def _known_data(cls, spec: str) -> str:
        return DATASETS.canonical(spec)

    @field_validator("model")
    @classmethod
    def _known_model(cls, spec: str) -> str:
        return models.canonical(spec)

    @field_validator("defenses")
    @classmethod
    def _known_defenses(cls, specs: tuple[str, ...]) -> tuple[str, ...]:
        if not specs:
            raise GradveilError("a case needs at least one defense")
        return distinct("defense", [DEFENSES.canonical(spec) for spec in specs])

    @field_validator("threat")
    @classmethod
    def _known_threat(cls, spec: str) -> str:
        return threat_model(spec).name

    @model_validator(mode="after")
    def _whole_batches(self) -> Case:
        if self.images % self.batch_size:
            raise GradveilError(f"{self.images} images do not make whole batches of {self.batch_size}")
        return self

    def effort(self) -> Budget:
        """The budget, with the case's own number of restarts where it gives one."""
        return _effort(self.budget, self.restarts)

    def digest(self, attack: str, defense: str, *, prior_only: bool) -> str:
        """Of a row: the same for equal plans, and different as soon as anything differs that the row depends on."""
        plan = self.as_json()
        del plan["attacks"], plan["defenses"], plan["training"], plan["unfit"]
        plan |= {"attack": attack, "prior_only": prior_only, "results": RESULTS}
        plan |= {"defense": "" if prior_only else defense, "effort": asdict(self.effort())}
        return _digest(plan)

    def as_json(self) -> Json:
        return self.model_dump(mode="json")


def make_case(fields: Json) -> Case:
    """A case from fields as the command line or a file gives them; what is wrong is said in one line."""
    return _made(Case, fields)


class ObservedCase(BaseModel):
    """An audit of saved exchanges: they fix data, model, recipe, defense and threat model; the attacks are left."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    observations: Annotated[tuple[str, ...], Field(min_length=1)]
    """Attack exchanges that gradveil train --tap saved instead, or a folder of observation files. Repeatable."""
    model: str | None = None
    """The user's own model, where the files name one by import path."""
    attacks: Attacks = ()
    restarts: int | None = Field(default=None, ge=1)
    budget: BudgetName = "standard"
    gallery: int = Field(default=100, ge=2)
    seed: int = Field(default=0, ge=0)
    training: tuple[str, ...] = ()
    """Folders of ``gradveil train``, one of them without a defense: what a defense costs is read off them."""
    device: Device = "cpu"

    @field_validator("model")
    @classmethod
    def _own_code(cls, spec: str | None) -> str | None:
        if spec is not None and not models.is_import_path(spec):
            raise GradveilError(
                "saved exchanges fix the model: beside --observations, --model only names your own code"
            )
        return spec

    def effort(self) -> Budget:
        """The budget, with the case's own number of restarts where it gives one."""
        return _effort(self.budget, self.restarts)

    def digest(
        self, attack: str, exchanges: Sequence[str], distractors: str | Sequence[str], *, prior_only: bool
    ) -> str:
        """Of a row: the same for equal exchanges and plans, wherever the files lie. Exchanges stand by digest."""
        plan = {
            "exchanges": exchanges, "distractors": distractors, "attack": attack, "prior_only": prior_only,
            "effort": asdict(self.effort()), "gallery": self.gallery, "seed": self.seed, "device": self.device,
            "results": RESULTS,
        }  # fmt: skip
        return _digest(plan)

    def as_json(self) -> Json:
        return self.model_dump(mode="json")


_FIXED = {
    "data": "--data",
    "defenses": "--defense",
    "threat": "--threat",
    "images": "--images",
    "every": "--every",
    "batch_size": "--batch-size",
    "recipe": "the recipe (--epochs, --mini-batch, --lr, --train-mode)",
}


def make_observed_case(fields: Json) -> ObservedCase:
    """A case of saved exchanges from fields; what the exchanges fix is refused."""
    fixed = [option for field, option in _FIXED.items() if field in fields]
    if fixed:
        raise GradveilError(f"saved exchanges fix {', '.join(fixed)}: leave it out beside --observations")
    return _made(ObservedCase, fields)


_Made = TypeVar("_Made", bound=BaseModel)


def _made(kind: type[_Made], fields: Json) -> _Made:
    try:
        return kind(**fields)
    except ValidationError as error:
        raise GradveilError(first_complaint(error, "case")) from None


def _digest(plan: Json) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def _effort(budget: str, restarts: int | None) -> Budget:
    named = BUDGETS[budget]
    return named if restarts is None else Budget(restarts, named.iterations)


def read_case(path: Path) -> Json:
    """The fields of a YAML case file."""
    return read_fields(path, "case", "lines such as 'data: cifar10-samples'")


class _Loader(yaml.SafeLoader):
    """Without aliases: ten lines of them stand for a text that fills the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it uses an alias (*name): write the value out")
        return super().compose_node(parent, index)


def read_fields(path: Path, kind: str, needs: str) -> Json:
    """The fields of a YAML file of this kind, such as a case; ``needs`` says what an empty one lacks."""
    try:
        fields = yaml.load(read_text(path, most=LARGEST_FILE), _Loader)
    except FileNotFoundError:
        raise GradveilError(f"there is no {kind} file {path}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # such as 2024-99-99, a date that is none
        raise GradveilError(f"{kind} file {path} cannot be read: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise GradveilError(f"{kind} file {path} cannot be read: it is nested without end") from None
    if not isinstance(fields, dict):
        raise GradveilError(f"{kind} file {path} holds no fields; it needs {needs}")
    return {str(key): value for key, value in fields.items()}


def first_complaint(error: ValidationError, whole: str) -> str:
    """The first thing that is wrong, after the name of its field; ``whole`` where it is about no single one."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}"
