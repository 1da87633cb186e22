from __future__ import annotations

from fractions import Fraction
from typing import Literal

import pytest

from gradveil.core.errors import GradveilError, UnknownNameError
from gradveil.core.registry import Registry, split_spec


@pytest.fixture
def tools() -> Registry[dict[str, object]]:
    registry: Registry[dict[str, object]] = Registry("tool")

    @registry.register("saw")
    def saw(
        context: str,
        *,
        teeth: int = 5,
        length: float = 1.0,
        kind: Literal["rip", "cross"] = "rip",
        hands: Literal[1, 2] = 1,
        oiled: bool = False,
        owner: str | None = None,
        grit: int | float | None = None,
    ) -> dict[str, object]:
        """Cuts wood."""
        return {"context": context, "teeth": teeth, "length": length, "kind": kind, "hands": hands, "oiled": oiled,
                "owner": owner, "grit": grit}  # fmt: skip

    @registry.register("nail")
    def nail(*, size: int) -> dict[str, object]:
        return {"size": size}

    return registry


def test_options_become_their_annotated_types(tools: Registry[dict[str, object]]) -> None:
    built = tools.build("saw:teeth=7,length=2,kind=cross,hands=2,oiled=true,owner=none,grit=1.5", "here")
    assert built == {"context": "here", "teeth": 7, "length": 2.0, "kind": "cross", "hands": 2, "oiled": True,
                     "owner": None, "grit": 1.5}  # fmt: skip
    assert isinstance(built["length"], float)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("saww", "did you mean saw"),
        ("zzz", "there are: nail, saw"),
        ("saw:tooth=3", "its options: teeth=5"),
        ("saw:teeth=many", "a whole number, not 'many'"),
        ("saw:length=long", "a number, not 'long'"),
        ("saw:kind=band", "one of rip, cross"),
        ("saw:hands=3", "one of 1, 2, not '3'"),
        ("saw:oiled=maybe", "true or false"),
        ("saw:teeth", "OPTION=VALUE"),
        ("saw:teeth=1,teeth=2", "stands twice"),
        ("saw:length=nan", "tool saw: length=nan is not a finite number"),
        ("saw:length=-Infinity", "tool saw: length=-Infinity is not a finite number"),
        ("saw:length=1e999", "length=1e999 is not a finite number"),
        ("saw:grit=nan", "tool saw: grit=nan is not a finite number"),
        ("nail", "write nail:size=VALUE"),
    ],
)
def test_a_bad_spec_is_one_line_that_says_what_to_do(tools: Registry[object], spec: str, words: str) -> None:
    with pytest.raises(GradveilError, match=words) as caught:
        tools.build(spec, "here")
    assert "\n" not in str(caught.value)


def test_a_name_is_registered_once(tools: Registry[object]) -> None:
    with pytest.raises(ValueError, match="twice"):
        tools.register("saw")(lambda: None)


def test_an_unknown_name_is_its_own_error(tools: Registry[object]) -> None:
    with pytest.raises(UnknownNameError):
        tools.get("hammer")


def test_canonical_is_one_spelling(tools: Registry[object]) -> None:
    assert tools.canonical("saw: oiled=TRUE , length=2") == tools.canonical("saw:length=2.0,oiled=true")
    assert tools.canonical("saw") == "saw"
    assert tools.summary("saw") == "Cuts wood."


def test_split_spec() -> None:
    assert split_spec("noise: sigma = 0.1 ") == ("noise", {"sigma": "0.1"})


def test_a_factory_elsewhere_is_imported_when_it_is_needed(tools: Registry[object]) -> None:
    tools.register_path("fraction", "fractions:Fraction")
    tools.register_path("nothing", "no_such_library_anywhere:make")
    assert list(tools) == ["fraction", "nail", "nothing", "saw"]
    assert tools.build("fraction", 1, 2) == Fraction(1, 2)
    with pytest.raises(GradveilError, match="cannot import 'no_such_library_anywhere'"):
        tools.get("nothing")
    with pytest.raises(UnknownNameError, match="did you mean fraction"):
        tools.get("fractoin")
    with pytest.raises(ValueError, match="twice"):
        tools.register_path("saw", "fractions:Fraction")
