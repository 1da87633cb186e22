"""docs/architecture.md is true: what it names exists, and the walks of an image are those that a trace finds."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from walk import WALKS, walked

from test_imports import LEVELS

PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
NAMED = re.compile(r"`([\w/]+)\.py:([\w.]+)`")


def section(walk: str) -> str:
    return PAGE.partition(f"\n### {walk}\n")[2].partition("\n### ")[0]


def test_rooms_stand_in_the_order_of_imports() -> None:
    rooms = re.findall(r"^\| `(\w+)/` \|", PAGE, flags=re.MULTILINE)
    assert rooms == [room for room in LEVELS if room in rooms]
    assert len(rooms) >= 17


def test_every_function_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 100
    for file, name in named:
        found: object = import_module(f"gradveil.{file.replace('/', '.')}")
        for part in name.split("."):
            assert hasattr(found, part), f"{file}.py has no {name}"
            found = getattr(found, part)


@pytest.mark.integration
@pytest.mark.parametrize("name", WALKS)
def test_the_walk_is_as_short_as_the_page_says_and_all_of_it_is_named(name: str) -> None:
    stated = re.search(rf"^\| `{name}` \| (\d+) \|", PAGE, flags=re.MULTILINE)
    assert stated is not None
    traced = set(walked(name).functions)
    assert len(traced) <= int(stated[1])
    assert traced <= {f"{file}.py {function}" for file, function in NAMED.findall(section(name))}
