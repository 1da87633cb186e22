"""The page as a whole: complete, self-contained, exact in its pictures, deaf to hostile text."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from gradveil.report import render
from gradveil.report.words import NO_MOVE
from report.outline import outline
from report.saved_audit import edit_audit, save_pictures, write_audit, write_full_audit


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
    images = outline(folder).pictures()
    files = ["truth.safetensors", *(row["files"]["reconstruction"] for row in edit_audit(folder)["rows"])]
    truth, none, noise, prior = (load_file(folder / file)["inputs"] for file in files)
    expected = np.concatenate([truth, none, noise, prior]).transpose(0, 2, 3, 1)
    shown = np.stack([pixels(image["src"]) for image in images[4:]])
    assert {image["src"] for image in images[:4]} == {image["src"] for image in images[4:8]}, "those that leak most"
    assert np.array_equal(shown, np.rint(expected * 255).astype(np.uint8).reshape(shown.shape))


def test_pictures_stand_under_the_image_they_were_matched_to(folder: Path) -> None:
    """An attack on a batch returns it in any order; the scores name the picture that each private image was given."""
    row = edit_audit(folder)["rows"][0]
    stored = load_file(folder / row["files"]["reconstruction"])["inputs"]
    usual = [image["src"] for image in outline(folder).pictures()]
    save_pictures(folder / row["files"]["reconstruction"], "reconstruction", stored[::-1].copy())
    assert [image["src"] for image in outline(folder).pictures()] != usual
    audit = edit_audit(folder)
    for at, image in enumerate(audit["rows"][0]["per_image"]):
        image["picture"] = 3 - at
    edit_audit(folder, **audit)
    assert [image["src"] for image in outline(folder).pictures()] == usual


def test_every_picture_has_its_own_description(folder: Path) -> None:
    descriptions = [image["alt"] for image in outline(folder).pictures()]
    assert len(descriptions) == 5 * 4
    assert all(descriptions)
    assert len(set(descriptions)) == len(descriptions)


def test_several_attacks_get_a_table_for_each_defense(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, attacks=["ig", "dlg"], images=2)
    page = outline(folder)
    captions = "Every defense under its worst attack", "No defense: every attack", "Every search without the update"
    assert all(caption in page.text for caption in captions)
    rows = 1 + (1 + 2 + 1) + 2 * (1 + 2 + 1) + (1 + 2)
    assert len(page.pictures()) == 2 * rows


def test_a_picture_that_is_shown_often_is_held_once(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, attacks=["ig", "dlg"], images=2)
    page = outline(folder)
    files = {row["files"]["reconstruction"] for row in edit_audit(folder)["rows"]}
    distinct = 2 * (1 + len(files))
    assert render(folder).read_text().count("data:image/png") == distinct == len({p["src"] for p in page.pictures()})
    names = [image["id"] for image in page.all("image")]
    assert len(set(names)) == len(names) > 0
    assert {use["href"] for use in page.all("use")} == {f"#{name}" for name in names}
    truth = np.rint(load_file(folder / "truth.safetensors")["inputs"][0].transpose(1, 2, 0) * 255)
    again = [one for one in page.pictures() if one["alt"] == "Private image 100, label 0"]
    assert len(again) == 4, "in each table"
    assert all(np.array_equal(pixels(one["src"]), truth) for one in again)


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
    (link,) = [link for link in page.all("a") if link["href"] == "#flag-1"]
    assert (link["title"] or "").startswith("prior-only as good: raised if the attack identified no more"), (
        "in the table"
    )
    assert len(page.all("summary")) == 1
    assert "prior-only as goodRaised if the attack identified no more images" in page.text, "on the card"
    assert "flag 1" not in page.text
    assert "flag-1" in [item.get("id") for item in page.all("li")]


def test_grades_are_shown_with_their_rule(folder: Path) -> None:
    page = outline(folder)
    assert "No defense, privacy grade F" in page.text
    assert "A up to 10%, B up to 25%, C up to 50%, D up to 75%, F above" in page.text
    assert "For accuracy lost in training" not in page.text


def test_a_bad_grade_is_never_shown_as_good_news(folder: Path) -> None:
    """One image that was not identified is not above chance, and says next to nothing."""
    verdicts = edit_audit(folder)["verdicts"]
    few = {"identified": 0.0, "identified_interval": [0.0, 0.79], "prior_only_identified": 0.0}
    many = {"identified": 0.0, "identified_interval": [0.0, 0.09], "prior_only_identified": 0.0}
    edit_audit(folder, verdicts=[verdicts[0] | few | {"grade": "F"}, verdicts[1] | many | {"grade": "A"}])
    page = outline(folder)
    assert [card["class"] for card in page.all("article")] == ["card unknown", "card holds"]
    assert page.text.count("○ Not above chance") == page.text.count("● Held against what was tried") == 1


def test_what_a_defense_costs_is_shown(folder: Path) -> None:
    audit = edit_audit(folder)
    cost = {"grade": "D", "accuracy": 0.7, "accuracy_lost": 0.0912, "time_added": 0.25, "sentence": "It costs."}
    audit["verdicts"][1]["cost"] = cost
    edit_audit(folder, verdicts=audit["verdicts"])
    text = outline(folder).text
    assert "9.1 points, grade D" in text
    assert "25% per round" in text
    assert "A up to 1, B up to 3, C up to 6, D up to 12, F above" in text


def test_ranks_are_a_column_where_an_attack_ranks(tmp_path: Path) -> None:
    assert "Ranked first" not in outline(write_audit(tmp_path / "plain")).text
    page = outline(write_full_audit(tmp_path / "full"))
    assert "Ranked first ↑" in page.text.replace("\xa0", " ")
    assert page.text.count("of 100") >= 5, "four defenses and chance"
    assert "the share of private images that they ranked first" in page.text


def test_a_verdict_by_ranks_shows_them(tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    verdicts = edit_audit(folder)["verdicts"]
    verdicts[0] |= {"candidates": 250, "ranked_first": 0.75}
    edit_audit(folder, verdicts=verdicts)
    text = " ".join(outline(folder).text.split())
    assert "Recognised ranked first by attacks that hold a list of candidates 100%" in text
    assert "the one it ranked first counts as its picture" in text


def test_a_verdict_by_choice_says_what_was_rebuilt(tmp_path: Path) -> None:
    folder = write_full_audit(tmp_path)
    page = outline(folder)
    text = " ".join(page.text.split())
    rebuilt = [verdict["rebuilt"] for verdict in edit_audit(folder)["verdicts"] if verdict.get("rebuilt")]
    assert len(rebuilt) == 3
    for one in rebuilt:
        assert f"by what attacks without a list rebuilt {100 * one['identified']:.0f}%" in text
    assert "Pictures rebuilt without a list of candidates were enough for that in" in text
    assert "noise:sigma=0.1under identify, its choice among 100 candidates" in text
    assert "identifyagainst noise:sigma=0.1, its choice among 100 candidates" in text
    assert "Chanceidentify without the update (prior only), its choice among 100 candidates" in text
    table = text.partition("Every defense under the worst attack without candidates")[2].partition("every attack")[0]
    assert table.count("under informed") == 4, "also of the defense whose worst attack rebuilds"
    assert "identify" not in table


def test_an_older_verdict_by_choice_is_still_shown(tmp_path: Path) -> None:
    folder = write_full_audit(tmp_path)
    verdicts = edit_audit(folder)["verdicts"]
    for verdict in verdicts:
        verdict.pop("rebuilt", None)
    edit_audit(folder, verdicts=verdicts)
    text = outline(folder).text
    assert "ithout candidates" not in text
    assert "its choice among 100 candidates" in text


def test_says_what_an_informed_attacker_does(tmp_path: Path) -> None:
    text = " ".join(outline(write_full_audit(tmp_path)).text.split())
    assert "noise:sigma=0.1 It answers noise:sigma=0.1." in text
    assert "Against clip:bound=1.0: It answers clip:bound=1.0. Against noise:sigma=2: It answers" in text
    assert f"censor {NO_MOVE}" in text


def test_an_audit_without_trainings_says_how_to_get_costs(folder: Path) -> None:
    page = outline(folder)
    assert "What the defenses cost was not measured" in page.text
    assert "--resume --training DIR" in page.text
    assert "scatter" not in [svg.get("class") for svg in page.all("svg")]


def test_privacy_stands_against_utility(tmp_path: Path) -> None:
    folder = write_full_audit(tmp_path)
    page = outline(folder)
    text = " ".join(page.text.split())
    assert "scatter" in [svg.get("class") for svg in page.all("svg")]
    assert "What the defenses cost was not measured" not in text
    assert "Hollow dots: no training was given for censor, so what that costs is not known." in text
    assert text.index("Truth beside reconstruction") < text.index("The numbers in the plot") < text.index("All results")
    for cost in ("the baseline", "2.0 points", "31.0 points", "not measured"):
        assert cost in text
    verdicts = edit_audit(folder)["verdicts"]
    verdicts[3] |= {"identified": None, "identified_interval": None}
    edit_audit(folder, verdicts=verdicts)
    assert "Not in the plot, as nothing could be scored: censor." in " ".join(outline(folder).text.split())


def test_defenses_that_were_left_out_are_named(folder: Path) -> None:
    assert "Not audited" not in outline(folder).text
    edit_audit(folder, left_out={"dp": "defense dp does not work with batch norm"})
    assert "Not audited: dp. defense dp does not work with batch norm" in outline(folder).text


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


@pytest.mark.integration
def test_needs_no_torch(folder: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; "
        "import gradveil.report; gradveil.report.render(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    assert (folder / "report.html").exists()


def test_many_images_are_cut_to_what_can_be_read(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, defenses=["none"], images=30)
    page = outline(folder)
    assert "The first 24 images are shown; 6 more are in the audit folder." in page.text
    assert len(page.pictures()) == 8 + 3 * 24
