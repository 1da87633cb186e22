"""Fields as a person writes them: read from a YAML file, and what is wrong with them in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gradveil.core.errors import GradveilError
from gradveil.core.reading import read_text

LARGEST = 2**20


class _Loader(yaml.SafeLoader):
    """Without aliases: ten lines of them stand for a text that fills the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it uses an alias (*name): write the value out")
        return super().compose_node(parent, index)


def read_fields(path: Path, kind: str, needs: str) -> dict[str, Any]:
    """The fields of a YAML file of this kind, such as a case; ``needs`` says what an empty one lacks."""
    try:
        fields = yaml.load(read_text(path, most=LARGEST), _Loader)
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
