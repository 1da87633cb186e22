"""Hostile text is only text on the page, and a damaged folder gets one line that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.report import render
from report.outline import Outline, outline
from report.saved_audit import edit_audit, photographs, save_pictures, write_audit, write_full_audit

HOSTILE = "</script></style><script>document.title='owned'</script><img src=x onerror=alert(1)>\"' {{ 7*7 }} <!--"
MEANT = ("prior-only", "none", "quick", "prior-only as good")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_audit(tmp_path / "audit")


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return write_full_audit(tmp_path / "audit")


def with_hostile_texts(value: Any) -> Any:
    """Every text in a JSON value made hostile, but for names of files and the names that mean something."""
    if isinstance(value, dict):
        return {key: inner if key == "files" else with_hostile_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_hostile_texts(inner) for inner in value]
    return value + HOSTILE if isinstance(value, str) and value not in MEANT else value


def structure(page: Outline) -> list[tuple[str, list[str]]]:
    """Tags with the names of their attributes; without those that only set a spec in its own type."""
    return [(tag, sorted(attributes)) for tag, attributes in page.tags if tag not in ("wbr", "code")]


@pytest.mark.parametrize("written", [write_audit, write_full_audit])
def test_hostile_text_is_only_text(tmp_path: Path, written: Callable[[Path], Path]) -> None:
    folder = written(tmp_path / "audit")
    usual = structure(outline(folder))
    edit_audit(folder, **with_hostile_texts(edit_audit(folder)))
    page = outline(folder)
    assert page.text.count("onerror=alert(1)") > 40
    assert structure(page) == usual


def nested(depth: int) -> dict[str, Any]:
    return {"data": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda f: (f / "audit.json").unlink(), "there is no"),
        (lambda f: (f / "audit.json").write_text('{"version": 1'), "not valid JSON"),
        (lambda f: (f / "audit.json").write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
        (lambda f: (f / "audit.json").write_text("[" * 100_000), "not valid JSON"),
        (lambda f: (f / "audit.json").write_text("[]"), "should be an object"),
        (lambda f: edit_audit(f, case=nested(400)), "nested too deeply"),
        (lambda f: edit_audit(f, version=3), "version 3, this gradveil reads version 1 and 2"),
        (lambda f: edit_audit(f, rows=[]), "no rows"),
        (lambda f: edit_audit(f, rows=[{"defense": "none"}]), "row 1: 'attack' should be a text"),
        (lambda f: (f / "truth.safetensors").unlink(), "is missing"),
        (lambda f: (f / "truth.safetensors").write_bytes(b"not a picture"), "cannot read"),
        (lambda f: save_pictures(f / "truth.safetensors", "reconstruction", photographs(4)), "was it renamed"),
        (lambda f: save_pictures(f / "truth.safetensors", "truth", photographs(3)), "holds 3 pictures, not all"),
    ],
)
def test_a_broken_folder_gets_one_line(folder: Path, damage: Any, complaint: str) -> None:
    damage(folder)
    with pytest.raises(BadFileError, match=complaint) as caught:
        render(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_a_folder_that_is_none_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="is not a folder"):
        render(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd"])
def test_files_outside_the_folder_are_refused(folder: Path, name: str) -> None:
    (folder / "truth.safetensors").rename(folder.parent / "outside.safetensors")
    audit = edit_audit(folder)
    for row in audit["rows"]:
        row["files"]["truth"] = name
    edit_audit(folder, **audit)
    with pytest.raises(BadFileError, match="no file in the audit folder"):
        render(folder)


def test_rows_about_other_images_are_refused(folder: Path) -> None:
    audit = edit_audit(folder)
    audit["rows"][1]["per_image"].pop()
    edit_audit(folder, **audit)
    with pytest.raises(BadFileError, match="row 2 is about other images"):
        render(folder)


def test_a_failed_render_keeps_the_last_report(folder: Path) -> None:
    before = render(folder).read_bytes()
    (folder / "truth.safetensors").unlink()
    with pytest.raises(BadFileError):
        render(folder)
    assert (folder / "report.html").read_bytes() == before


def test_a_report_that_cannot_be_written_gets_one_line(folder: Path) -> None:
    (folder / "report.html").mkdir()
    with pytest.raises(GradveilError, match="cannot write"):
        render(folder)
    assert not list(folder.glob(".*"))


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in inner for path in paths(item, (*at, key)))]


def complaint_of(folder: Path) -> str:
    """The error a person would read; empty when there is a page."""
    try:
        render(folder)
    except GradveilError as error:
        return str(error)
    return ""


AWKWARD = st.sampled_from([10**400, -0.0, 1e308, "\ud800", "\x00", "..", "", "none", "prior-only"])
JSON = st.recursive(
    AWKWARD | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.integration
@given(data=st.data(), value=JSON)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_anywhere_gives_a_page_or_one_line(full: Path, data: st.DataObject, value: Any) -> None:
    original = (full / "audit.json").read_text()
    audit = json.loads(original)
    for row in audit["rows"]:
        row["trace"] = {"steps": [0, 1], "objective": [[1.0, 0.5]]}
    *way, last = data.draw(st.sampled_from(paths(audit)[1:]))
    place = audit
    for step in way:
        place = place[step]
    place[last] = value
    (full / "audit.json").write_text(json.dumps(audit))
    complaint = complaint_of(full)
    (full / "audit.json").write_text(original)
    assert "\n" not in complaint
