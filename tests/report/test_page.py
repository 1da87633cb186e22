"""The page as a whole: complete, self-contained, exact in its pictures, deaf to hostile text."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.report import render
from report.saved_audit import edit_audit, photographs, save_pictures, write_audit

HOSTILE = "</script></style><script>document.title='owned'</script><img src=x onerror=alert(1)>\"' {{ 7*7 }} <!--"


class Outline(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def outline(folder: Path) -> Outline:
    return Outline(render(folder).read_text(encoding="utf-8"))


def pixels(address: str | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    assert address is not None
    data = address.removeprefix("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_audit(tmp_path / "audit")


def test_writes_one_file_beside_the_audit(folder: Path) -> None:
    before = set(folder.iterdir())
    path = render(folder)
    assert path == folder / "report.html"
    assert set(folder.iterdir()) - before == {path}


def test_is_the_same_every_time(folder: Path) -> None:
    assert render(folder).read_bytes() == render(folder).read_bytes()


def test_refers_to_nothing_outside_itself(folder: Path) -> None:
    page = outline(folder)
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name, value)
    assert {a["href"] for a in page.all("a")} <= {f"#{attributes.get('id')}" for _, attributes in page.tags}
    css = render(folder).read_text().partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in css
    assert "@import" not in css


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_exact(tmp_path: Path, channels: int) -> None:
    folder = write_audit(tmp_path, channels=channels)
    images = outline(folder).all("img")
    files = ["truth.safetensors", *(row["files"]["reconstruction"] for row in edit_audit(folder)["rows"])]
    truth, none, noise, prior = (load_file(folder / file)["inputs"] for file in files)
    expected = np.concatenate([truth, none, noise, prior]).transpose(0, 2, 3, 1)
    shown = np.stack([pixels(image["src"]) for image in images])
    assert np.array_equal(shown, np.rint(expected * 255).astype(np.uint8).reshape(shown.shape))


def test_pictures_stand_under_the_image_they_were_matched_to(folder: Path) -> None:
    """An attack on a batch returns it in any order; the scores name the picture that each private image was given."""
    row = edit_audit(folder)["rows"][0]
    stored = load_file(folder / row["files"]["reconstruction"])["inputs"]
    usual = [image["src"] for image in outline(folder).all("img")]
    save_pictures(folder / row["files"]["reconstruction"], "reconstruction", stored[::-1].copy())
    assert [image["src"] for image in outline(folder).all("img")] != usual
    audit = edit_audit(folder)
    for at, image in enumerate(audit["rows"][0]["per_image"]):
        image["picture"] = 3 - at
    edit_audit(folder, **audit)
    assert [image["src"] for image in outline(folder).all("img")] == usual


def test_every_picture_has_its_own_description(folder: Path) -> None:
    descriptions = [image["alt"] for image in outline(folder).all("img")]
    assert len(descriptions) == 4 * 4
    assert all(descriptions)
    assert len(set(descriptions)) == len(descriptions)


def test_several_attacks_get_a_table_for_each_defense(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, attacks=["ig", "dlg"], images=2)
    page = outline(folder)
    captions = "Every defense under its worst attack", "No defense: every attack", "Every search without the update"
    assert all(caption in page.text for caption in captions)
    rows = (1 + 2 + 1) + 2 * (1 + 2 + 1) + (1 + 2)
    assert len(page.all("img")) == 2 * rows


def test_says_the_verdict_first_and_in_words(folder: Path) -> None:
    text = outline(folder).text
    verdict = edit_audit(folder)["verdicts"][0]["sentence"]
    assert verdict in text
    assert text.index(verdict) < text.index("What was assumed") < text.index("Truth beside reconstruction")
    assert "100% of private images were identified with no defense" in text


def test_headings_are_in_order(folder: Path) -> None:
    levels = [int(tag[1]) for tag, _ in outline(folder).tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_an_unfinished_audit_says_so(folder: Path) -> None:
    assert "not finished" not in outline(folder).text
    edit_audit(folder, complete=False)
    assert "This audit is not finished." in outline(folder).text


def test_flags_are_explained_and_linked(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, defenses=["none", "noise:sigma=1", "noise:sigma=2"])
    page = outline(folder)
    assert "prior-only as good: raised if the attack identified no more images than the same search" in page.text
    assert "because its pictures may come from the prior alone. (Raised against noise:sigma=2.)" in page.text
    links = [link for link in page.all("a") if link["href"] == "#flag-1"]
    assert [link["title"] for link in links] == ["prior-only as good"] * 2, "on the card and in the table"
    assert "flag-1" in [item.get("id") for item in page.all("li")]


def test_grades_are_shown_with_their_rule(folder: Path) -> None:
    page = outline(folder)
    assert "No defense, privacy grade F" in page.text
    assert "A up to 10%, B up to 25%, C up to 50%, D up to 75%, F above" in page.text
    assert "accuracy lost" not in page.text.lower()


def test_what_a_defense_costs_is_shown(folder: Path) -> None:
    audit = edit_audit(folder)
    cost = {"grade": "D", "accuracy": 0.7, "accuracy_lost": 0.0912, "time_added": 0.25, "sentence": "It costs."}
    audit["verdicts"][1]["cost"] = cost
    edit_audit(folder, verdicts=audit["verdicts"])
    text = outline(folder).text
    assert "9.1 points, grade D" in text
    assert "25% per round" in text
    assert "A up to 1, B up to 3, C up to 6, D up to 12, F above" in text


def test_an_audit_without_grades_is_still_shown(folder: Path) -> None:
    audit = edit_audit(folder, flags=None, grades=None)
    for verdict in audit["verdicts"]:
        for key in ("grade", "flags", "cost"):
            del verdict[key]
    edit_audit(folder, verdicts=audit["verdicts"])
    text = outline(folder).text
    assert "privacy grade" not in text
    assert "Grades go from" not in text


def test_values_that_are_not_available_say_why(folder: Path) -> None:
    audit = edit_audit(folder)
    for row in audit["rows"]:
        row |= {"lpips": None, "identified_by": "ssim", "not_available": {"lpips": "weights cannot be had offline"}}
        for image in row["per_image"]:
            image["lpips"] = None
    edit_audit(folder, **audit)
    text = outline(folder).text
    assert "LPIPS: weights cannot be had offline" in text
    assert "SSIM 0." in text  # pictures show what the identification went by
    assert "nan" not in text.lower().split()


def test_an_audit_of_nulls_is_still_a_page(folder: Path) -> None:
    audit = edit_audit(folder)
    kept = {"defense", "attack", "prior_of", "files", "per_image"}
    for row in audit["rows"]:
        row |= {key: None for key in row if key not in kept}
        row["per_image"] = [{"index": image["index"]} for image in row["per_image"]]
    verdicts = [{"defense": "none"}]
    edit_audit(folder, rows=audit["rows"], verdicts=verdicts, case={}, environment={})
    assert "this audit has no verdict" in outline(folder).text


def with_hostile_texts(value: Any) -> Any:
    """Every text in a JSON value made hostile, but for names of files and the name that marks chance."""
    if isinstance(value, dict):
        return {key: inner if key == "files" else with_hostile_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_hostile_texts(inner) for inner in value]
    return value + HOSTILE if isinstance(value, str) and value != "prior-only" else value


def structure(page: Outline) -> list[tuple[str, list[str]]]:
    """Tags with the names of their attributes; without those that only set a spec in its own type."""
    return [(tag, sorted(attributes)) for tag, attributes in page.tags if tag not in ("wbr", "code")]


def test_hostile_text_is_only_text(folder: Path) -> None:
    usual = structure(outline(folder))
    edit_audit(folder, **with_hostile_texts(edit_audit(folder)))
    page = outline(folder)
    assert page.text.count("onerror=alert(1)") > 50
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
        (lambda f: edit_audit(f, version=2), "version 2, this gradveil reads version 1"),
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


@given(data=st.data(), value=JSON)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_anywhere_gives_a_page_or_one_line(folder: Path, data: st.DataObject, value: Any) -> None:
    original = (folder / "audit.json").read_text()
    audit = json.loads(original)
    for row in audit["rows"]:
        row["trace"] = {"steps": [0, 1], "objective": [[1.0, 0.5]]}
    *way, last = data.draw(st.sampled_from(paths(audit)[1:]))
    place = audit
    for step in way:
        place = place[step]
    place[last] = value
    (folder / "audit.json").write_text(json.dumps(audit))
    complaint = complaint_of(folder)
    (folder / "audit.json").write_text(original)
    assert "\n" not in complaint


def test_needs_no_torch(folder: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; "
        "import gradveil.report; gradveil.report.render(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_the_largest_report_keeps_its_weight(tmp_path: Path) -> None:
    defenses, attacks = [f"noise:sigma={d}" for d in range(15)], [f"attack{a}" for a in range(10)]
    folder = write_audit(tmp_path, defenses=defenses, attacks=attacks, images=20)
    assert render(folder).stat().st_size <= 15_000_000
    assert "128 colors" in outline(folder).text


def test_many_images_are_cut_to_what_can_be_read(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, defenses=["none"], images=30)
    page = outline(folder)
    assert "The first 24 images are shown; 6 more are in the audit folder." in page.text
    assert len(page.all("img")) == 3 * 24
