"""Fields as a person or a stranger writes them: typed, checked when they are given, what is wrong said in one line."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from gradveil.core.errors import GradveilError

Json = dict[str, Any]
"""A JSON object whose fields are not known here: those of a person's file, or of a record that others define."""

_KINDS: dict[Any, str] = {bool: "true or false", str: "a text", float: "a number", int: "a whole number"}


class Fields(BaseModel):
    """Fields that cannot change. What is wrong with one is a GradveilError, not pydantic's.

    It says what a good value is: the title of the field or, where it has none, its type. The description says that
    too, unless attributes have docstrings (``use_attribute_docstrings``): those are the help of options.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    dashed: ClassVar[bool] = False
    """Whether people write ``batch-size`` for ``batch_size``."""

    def __init__(self, /, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise GradveilError(self._complaint(error)) from None

    @classmethod
    def _complaint(cls, error: ValidationError) -> str:
        first, known = error.errors()[0], cls.model_fields
        if not first["loc"]:  # a half of a character, which pydantic cannot look up
            return f"a {cls.__name__.lower()} has a field whose name is no text"
        name = str(first["loc"][0])
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            return f"a {cls.__name__.lower()} has no field {shown(name)}; {hint}"
        spelled = name.replace("_", "-") if cls.dashed else name
        helped = cls.model_config.get("use_attribute_docstrings", False)
        meaning = known[name].title or (None if helped else known[name].description) or _kind(known[name])
        return f"{spelled} is {meaning}, not {shown(first['input'])}"


def _kind(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(get_args(field.annotation))}"
    kinds = field.annotation, *get_args(field.annotation)
    return next((text for kind, text in _KINDS.items() if kind in kinds), f"a {field.annotation}")


def none_from_text(model: type[BaseModel], given: Json) -> Json:
    """The fields with None for the text ``none`` where a model allows None: TOML has no null."""
    optional = {name for name, field in model.model_fields.items() if type(None) in get_args(field.annotation)}
    return {name: None if name in optional and value == "none" else value for name, value in given.items()}


def shown(value: object) -> str:
    """A value as errors quote it: one short line, whatever it is."""
    try:
        text = ascii(value)
    except ValueError:  # Python writes out no whole number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
