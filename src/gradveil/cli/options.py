"""Options made of the fields of a case: each is said once, in its pydantic model, with its description as the help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import torch
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gradveil.attacks import ATTACKS
from gradveil.auditing import read_case
from gradveil.core.errors import GradveilError
from gradveil.core.fields import Json
from gradveil.core.plugins import refuse_unloaded_models
from gradveil.core.registry import Registry
from gradveil.defenses import DEFENSES

Command = Callable[..., None]
_REGISTRIES: dict[str, Registry[Any]] = {
    "attack": ATTACKS,
    "attacks": ATTACKS,
    "defense": DEFENSES,
    "defenses": DEFENSES,
}
_RENAMED = {"attacks": "attack", "defenses": "defense", "in_rounds": "in_round"}
"""Options that may be repeated are named after one value."""
_METAVARS = {"observations": "DIR", "training": "DIR", "tap": "CLIENT@ROUND", "in_rounds": "NUMBER"}


def options_from(*models: type[BaseModel], leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """A decorator: in the place of its parameter ``given``, a command gets an option for each field of the models.

    It is called with a dict of the fields that were given. Code that they name by import path is loaded by then.
    """
    fields: dict[str, FieldInfo] = {}
    for model in models:
        fields |= {name: field for name, field in model.model_fields.items() if name not in fields}
    names = {_RENAMED.get(name, name): name for name in fields if name not in leave_out}

    def wrapped(command: Command) -> Command:
        def run(**arguments: Any) -> None:
            said = {name: arguments.pop(option) for option, name in names.items()}
            given = {name: value for name, value in said.items() if value is not None and value != []}
            admit(given)
            command(given=given, **arguments)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            made = [_parameter(option, name, fields[name]) for option, name in names.items()]
            parameters += made if parameter.name == "given" else [parameter]
        return with_parameters(run, parameters, command.__doc__)

    return wrapped


def with_parameters(command: Command, parameters: Iterable[inspect.Parameter], doc: str | None) -> Command:
    """A command that takes all as keywords, as Typer should see it."""
    alone = [one.replace(kind=one.KEYWORD_ONLY) for one in parameters]
    command.__signature__ = inspect.Signature(alone)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in alone}
    command.__doc__ = doc
    return command


def admit(given: Mapping[str, Any]) -> None:
    """Load the code that attacks and defenses of the command line name by import path: a person typed it."""
    for name, registry in _REGISTRIES.items():
        specs = given.get(name) or ()
        for spec in [specs] if isinstance(specs, str) else specs:
            registry.admit(spec)


def fields_of_file(path: Path, given: Mapping[str, Any]) -> Json:
    """The fields of a case file with those of the options over them. The file alone loads no code."""
    fields = {**read_case(path), **given}
    refuse_unloaded_models({name: value for name, value in fields.items() if name not in given})
    return fields


def checked_device(said: str | None) -> str:
    """``cpu`` or ``cuda``, refused where it is not there; default: ``cuda`` if available."""
    if said is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if said not in ("cpu", "cuda"):
        raise GradveilError(f"device is cpu or cuda, not {said!r}")
    if said == "cuda" and not torch.cuda.is_available():
        raise GradveilError("there is no CUDA device here: leave --device out, or say cpu")
    return said


def _parameter(option: str, name: str, field: FieldInfo) -> inspect.Parameter:
    several = get_origin(field.annotation) is tuple
    kinds = (field.annotation, *get_args(field.annotation))
    # A text by default: what a Literal allows is said by the model, in the same words as for a file.
    kind: Any = list[str] if several else next((kind for kind in (bool, float, int) if kind in kinds), str)
    help_text, default = " ".join((field.description or "").split()), field.default
    if default not in (None, ()) and not field.is_required() and kind is not bool and name != "device":
        help_text += f" [default: {', '.join(default) if several else default}]"
    read = Annotated[kind | None, typer.Option(help=help_text, metavar=_METAVARS.get(name))]
    return inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=read)
