"""Fields that are checked when they are given: one line for whatever is wrong, printable and short."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from gradveil.core.errors import GradveilError
from gradveil.core.fields import Fields, none_from_text, shown


class Plan(Fields):
    """Of every kind."""

    name: str = "x"
    way: Literal["on", "off"] = "on"
    again: bool = False
    rate: int | float = 1.0
    most: Annotated[int | None, Field(ge=1, description="a whole number of at least 1")] = None


class Dashed(Plan):
    """The same, as a config spells it."""

    dashed = True
    at_most: int = 1


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"name": 3}, "name is a text, not 3"),
        ({"way": "up"}, "way is one of on, off, not 'up'"),
        ({"again": 1}, "again is true or false, not 1"),
        ({"rate": "fast"}, "rate is a number, not 'fast'"),
        ({"rate": float("nan")}, "rate is a number, not nan"),
        ({"most": 0}, "most is a whole number of at least 1, not 0"),
        ({"most": True}, "most is a whole number of at least 1, not True"),
        ({"nam": "y"}, "a plan has no field 'nam'; did you mean name?"),
        ({"self": 1}, "a plan has no field 'self'; there are: name, way, again, rate, most"),
        ({"\ud800": 1}, "a plan has a field whose name is no text"),
        ({"a" * 500: 1}, f"a plan has no field '{'a' * 56}...; there are: name, way, again, rate, most"),
        ({"name": [0] * 99}, f"name is a text, not {str([0] * 99)[:57]}..."),
        ({"name": 10**5000}, "name is a text, not a number of thousands of digits"),
    ],
)
def test_what_is_wrong_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(GradveilError) as caught:
        Plan(**given)
    assert str(caught.value) == line


def test_a_field_is_named_as_a_config_spells_it() -> None:
    with pytest.raises(GradveilError, match=r"^at-most is a whole number, not 1\.5$"):
        Dashed(at_most=1.5)  # type: ignore[arg-type]


def test_numbers_stay_as_they_were_written() -> None:
    assert type(Plan(rate=1).rate) is int
    assert type(Plan(rate=1.0).rate) is float


def test_the_text_none_is_none_where_none_may_be() -> None:
    assert none_from_text(Plan, {"most": "none", "name": "none"}) == {"most": None, "name": "none"}


def test_a_value_is_shown_in_printable_characters() -> None:
    assert shown("\x1b[31m\n") == r"'\x1b[31m\n'"
