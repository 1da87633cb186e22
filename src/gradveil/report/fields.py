"""Checked access to JSON from a file: each value has the kind that is asked for, or one line says which does not.

>>> row = Fields({"psnr": 21.5, "lpips": None}, "audit.json, row 1")
>>> row.number("psnr"), row.number("lpips"), row.number("ssim")
(21.5, None, None)
>>> row.text("attack")
Traceback (most recent call last):
...
gradveil.core.errors.BadFileError: audit.json, row 1: 'attack' should be a text; the file is damaged
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

from gradveil.core.errors import BadFileError


class Fields:
    """One JSON object and where it stands, for error messages."""

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise BadFileError(f"{where} should be an object; the file is damaged")
        self.raw: Mapping[str, object] = value

    def text(self, key: str) -> str:
        value = self.raw.get(key)
        return value if isinstance(value, str) else self._refuse(key, "a text")

    def optional_text(self, key: str) -> str | None:
        return None if self.raw.get(key) is None else self.text(key)

    def number(self, key: str) -> float | None:
        """A finite number; None where it is absent, null, NaN or infinite: all of these mean that there is no value."""
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._refuse(key, "a number or null")
        return finite(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key, False)
        return value if isinstance(value, bool) else self._refuse(key, "true or false")

    def items(self, key: str) -> list[object]:
        """A list; empty where it is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return []
        return value if isinstance(value, list) else self._refuse(key, "a list")

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.items(key)
        return tuple(v if isinstance(v, str) else self._refuse(key, "a list of texts") for v in values)

    def object(self, key: str) -> Fields:
        """An object; empty where it is absent or null."""
        value = self.raw.get(key)
        return Fields({} if value is None else value, f"{self.where}, {key}")

    def objects(self, key: str, name: str) -> list[Fields]:
        """A list of objects, each called ``name`` and its number in error messages."""
        return [Fields(item, f"{self.where}, {name} {i}") for i, item in enumerate(self.items(key), start=1)]

    def interval(self, key: str) -> tuple[float, float] | None:
        values = self.items(key)
        if not values:
            return None
        low, high = (number_or_none(v) for v in values) if len(values) == 2 else (None, None)
        return None if low is None or high is None else (low, high)

    def _refuse(self, key: str, kind: str) -> NoReturn:
        raise BadFileError(f"{self.where}: {key!r} should be {kind}; the file is damaged")


def number_or_none(value: object) -> float | None:
    """A finite number as float; None for anything else."""
    return finite(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # JSON has whole numbers of any size
        return None
    return number if math.isfinite(number) else None
