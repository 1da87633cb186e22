"""The verdict: grades that follow their rule, a defense that does nothing, one that sends nothing, and costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from gradveil.auditing import Audit, Row, Verdict, make_case, read_audit, run_case, score_again, write_junit
from gradveil.auditing.audit import Answer
from gradveil.auditing.gate import AuditGate
from gradveil.auditing.verdict import costs, privacy_grade, verdicts
from gradveil.auditing.version1 import judged
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses import DEFENSES, Defense
from gradveil.defenses.base import Step
from gradveil.federated import Training, run_training
from gradveil.metrics import wilson


class Raw(Defense):
    """Promises much and sends the gradient as it is."""


class Zeros(Defense):
    """Sends nothing at all."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        return map_each(torch.zeros_like, gradient)


@pytest.fixture(scope="module")
def extremes() -> Any:
    """Two defenses of our own, registered for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEFENSES._factories, "raw", Raw)
        patch.setitem(DEFENSES._factories, "zeros", Zeros)
        yield


@pytest.fixture(scope="module")
def train(extremes: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Train with these settings and name the folder; a minute of training in a second."""
    del extremes

    def trained(**settings: Any) -> str:
        folder = tmp_path_factory.mktemp("training")
        plain = {"data": "mnist-samples", "clients": 2, "rounds": 6, "batch_size": 8}
        run_training(Training(**{**plain, **settings}), folder)
        return str(folder)

    return trained


@pytest.fixture(scope="module")
def audited(train: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit of both defenses with their trainings, by a closed form: exact where there is anything to read."""
    folder = tmp_path_factory.mktemp("extremes") / "audit"
    case = {
        "data": "mnist-samples",
        "model": "mlp",
        "images": 60,
        "attacks": ["analytic"],
        "defenses": ["raw", "zeros"],
        "training": [train(defense=defense) for defense in ("none", "raw", "zeros")],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADVEIL_OFFLINE", "1")
        patch.setenv("GRADVEIL_CACHE", str(folder / "empty"))
        run_case(make_case(case), folder)
    return folder


def saved(folder: Path) -> dict[str, Any]:
    audit: dict[str, Any] = json.loads((folder / "audit.json").read_text())
    return audit


@pytest.mark.integration
def test_a_defense_that_does_nothing_gets_the_worst_grade(audited: Path) -> None:
    raw, _ = saved(audited)["verdicts"]
    assert (raw["grade"], raw["identified"], raw["cost"]["grade"]) == ("F", 1.0, "A")
    assert (raw["threat"], raw["adversary"]) == ("D", "data-enhanced eavesdropper")
    assert raw["sentence"].startswith(
        "Under raw, all 60 private images were picked out of 100 by what analytic rebuilt"
    )


def test_a_defense_that_sends_nothing_is_private_and_useless(audited: Path) -> None:
    raw, zeros = saved(audited)["verdicts"]
    assert (zeros["grade"], zeros["cost"]["grade"]) == ("C", "F"), "60 images allow an A, but no candidates were tried"
    assert "no candidates" in zeros["flags"]
    assert "no counter-move" not in zeros["flags"]
    assert zeros["sentence"].endswith("No attack held a list of candidates.")
    assert zeros["cost"]["accuracy_lost"] > 0.12 > raw["cost"]["accuracy_lost"]
    assert "diverged" in zeros["flags"]
    assert "points of accuracy lost" in zeros["cost"]["sentence"]


@pytest.mark.integration
def test_costs_are_still_there_when_scored_again(
    audited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    before = saved(audited)["verdicts"]
    after = score_again(audited).as_json()["verdicts"]
    assert [verdict["cost"] for verdict in after] == [verdict["cost"] for verdict in before]


def graded(identified: int, images: int, at_random: float = 0.01) -> str | None:
    return privacy_grade(wilson(identified, images), at_random)


@pytest.mark.parametrize(
    ("identified", "images", "grade"),
    [(0, 32, "A"), (0, 31, "B"), (0, 12, "B"), (0, 11, "C"), (0, 4, "C"), (0, 3, "D"), (0, 2, "D"), (0, 1, "F"),
     (1, 60, "A"), (16, 32, "D"), (32, 32, "F")],
)  # fmt: skip
def test_a_good_grade_takes_many_images(identified: int, images: int, grade: str) -> None:
    assert graded(identified, images) == grade


def test_a_grade_takes_chance_off() -> None:
    assert graded(8, 40) == "C"
    assert graded(8, 40, at_random=0.2) == "B", "one in five is what guessing gets, or twenty images behind each update"
    assert privacy_grade(None, None) is None
    assert graded(8, 40, at_random=1.0) is None, "every pick is right"


def row(attack: str, identified: float | None, psnr: float = 10.0, **more: Any) -> Row:
    """What a verdict reads of one attack on four images without a defense."""
    plain = {
        "defense": "none",
        "attack": attack,
        "threat": "D+labels",
        "adversary": "data-enhanced eavesdropper, labels",
        "identified": identified,
        "identified_interval": None if identified is None else wilson(round(4 * identified), 4),
        "label_accuracy": 1.0,
        "psnr": psnr,
        "images": 4,
        "gallery": 10,
        "at_random": 0.1,
        "flags": [attack],
        "files": {"reconstruction": "reconstruction.safetensors"},
    }
    return Row(**{**plain, **more})


def choice(attack: str, identified: float, **more: Any) -> Row:
    """The same of an attack that chooses among candidates."""
    return row(attack, identified, 100.0, **{"candidates": 50, "ranked_first": identified, **more})


def test_the_worst_attack_makes_the_verdict() -> None:
    (verdict,) = verdicts([row("ig", 0.5, 20.0), row("gi", 0.75, 12.0), row("idlg", 0.75, 13.0)])
    assert (verdict.attack, verdict.cost) == ("idlg", None)
    assert verdict.flags == ("idlg", "no candidates")
    assert verdict.adversary == "data-enhanced eavesdropper, labels"
    assert verdict.identified_interval == wilson(3, 4)


def test_a_verdict_by_choice_says_what_was_rebuilt() -> None:
    alone = row("prior-only", 0.25, prior_of="gi")
    rows = [choice("identify", 1.0), choice("fingerprint", 0.75), row("ig", 0.5, 12.0), row("gi", 0.5, 13.0), alone]
    (verdict,) = verdicts(rows)
    assert (verdict.attack, verdict.grade, verdict.identified) == ("identify", "F", 1.0)
    assert verdict.rebuilt is not None
    assert verdict.rebuilt.model_copy(update={"sentence": ""}) == Answer(
        attack="gi", share=0.5, interval=wilson(2, 4), chance=0.25, above_chance=False
    )
    assert verdict.rebuilt.sentence == "2 of 4 private images were picked out by what gi rebuilt without candidates."
    assert verdict.recognised is not None
    assert (verdict.recognised.attack, verdict.recognised.share) == ("identify", 1.0)
    others = [one.model_copy(update={"defense": "clip"}) for one in rows[:2]]
    assert [one.rebuilt_apart for one in verdicts([*rows, *others])] == [verdict.rebuilt, None], "each defense its own"


def test_candidates_of_the_attacks_own_are_candidates_too() -> None:
    """Such a row has no rank of the private images, which need not be on that list."""
    (verdict,) = verdicts([row("identify:candidates=mnist-samples", 0.75), row("ig", 0.25)])
    assert verdict.rebuilt is not None
    assert verdict.rebuilt.attack == "ig"


@pytest.mark.parametrize(
    "rows",
    [
        [row("ig", 0.5), choice("identify", 0.25)],
        [choice("identify", 1.0), choice("fingerprint", 0.5)],
        [choice("identify", 1.0), row("ig", None)],
        [row("ig", None), row("gi", None)],
    ],
    ids=["the worst itself rebuilds", "only choices", "not scored", "nothing scored"],
)
def test_nothing_is_said_of_rebuilding_where_there_is_nothing_more_to_say(rows: list[Row]) -> None:
    (verdict,) = verdicts(rows)
    assert verdict.rebuilt_apart is None


def test_trainings_that_cannot_be_compared_are_refused(train: Callable[..., str]) -> None:
    plain, zeros = train(rounds=1), train(rounds=1, defense="zeros")
    assert set(costs([plain, zeros], ["zeros"])) == {"zeros"}
    for folders, words in (
        ([zeros], "needs one without a defense"),
        ([plain, train(rounds=1)], "of the same defense"),
        ([plain, train(rounds=2, defense="raw")], r"other settings .* \(rounds\)"),
        (["nowhere"], "holds no training"),
    ):
        with pytest.raises(GradveilError, match=words):
            costs(folders)
    with pytest.raises(GradveilError, match="add --defense zeros"):
        costs([plain, zeros], ["none"])


def test_a_training_that_is_not_finished_is_refused(train: Callable[..., str]) -> None:
    folder = Path(train(rounds=1))
    found = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps(found | {"complete": False}))
    with pytest.raises(GradveilError, match="not finished"):
        costs([str(folder)])


@pytest.mark.parametrize("row", [{"seconds": 0}, {"accuracy": float("nan")}, {"accuracy": 7}, {"seconds": "soon"}])
def test_a_damaged_training_is_one_line(train: Callable[..., str], row: dict[str, Any]) -> None:
    folder = Path(train(rounds=1))
    found = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps(found | {"rows": [found["rows"][0] | row]}))
    with pytest.raises(BadFileError, match=r"is (damaged|not a training)"):
        costs([str(folder)])


def junit(audit: Audit, path: Path, *bounds: str) -> dict[str, ElementTree.Element]:
    write_junit(audit, path, AuditGate.read(bounds))
    suite = ElementTree.parse(path).getroot()
    tests = {str(test.get("name")): test for test in suite.iter("testcase")}
    assert suite.get("tests") == str(len(tests))
    assert suite.get("failures") == str(len(suite.findall("testcase/failure")))
    assert suite.get("skipped") == str(len(suite.findall("testcase/skipped")))
    return tests


def test_junit_has_one_test_per_defense_and_fails_with_the_sentence(audited: Path, tmp_path: Path) -> None:
    audit = read_audit(audited)
    raw, zeros = audit.verdicts
    for bounds in ([], ["identified=0.1"]):
        tests = junit(audit, tmp_path / "audit.xml", *bounds)
        assert tests["raw"].findtext("failure") == f"{raw.sentence} Flags: no counter-move, no candidates."
        assert tests["zeros"].find("failure") is None
        said = f"Grade C. {zeros.sentence} Flags: {', '.join(zeros.flags)}."
        assert "diverged" in said, "a grade for want of a search that worked has to show"
        assert tests["zeros"].findtext("system-out") == said
    assert junit(audit, tmp_path / "audit.xml", "identified=1")["raw"].find("failure") is None


def test_junit_survives_odd_names_and_skips_what_was_not_scored(tmp_path: Path) -> None:
    odd = Verdict(defense="a<b>&\0\uffff", sentence="nothing \x08 could be scored")
    tests = junit(Audit(verdicts=(odd,), rows=()), tmp_path / "deep" / "audit.xml")
    skipped = tests["a<b>&??"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "nothing ? could be scored"


def test_an_attack_that_ranks_is_said_to_rank() -> None:
    ranks = choice("identify", 0.75, defense="clip")
    alone = choice("prior-only", 0.25, prior_of="identify", ranked_first=0.0)
    (verdict,) = verdicts([ranks, alone])
    assert verdict.sentence == (
        "Under clip, 3 of 4 private images were ranked first among 50 candidates by identify, "
        "and 0 of 4 without the update."
    )
    assert (verdict.candidates, verdict.ranked_first) == (50, 0.75)
    (lookalike,) = verdicts([choice("identify", 0.75, defense="clip", ranked_first=0.5)])
    assert lookalike.sentence == (
        "Under clip, 2 of 4 private images were ranked first among 50 candidates by identify. "
        "The pictures it chose pick 3 of 4 out of 10."
    )


def verdict(share: float | None, low: float, alone: float | None = 0.0, **more: Any) -> Verdict:
    """A verdict on four images before it is judged."""
    found = {"identified": share, "identified_interval": (low, 1.0), "prior_only_identified": alone}
    return Verdict(**{"defense": "noise", "images": 4, "at_random": 0.0, **found, **more})


def test_chance_is_the_search_without_the_update_or_picking_at_random() -> None:
    assert judged(verdict(1.0, 0.5, alone=0.25, at_random=0.1)).chance == 0.25
    assert judged(verdict(1.0, 0.5, alone=0.0, at_random=0.1)).chance == 0.1
    assert judged(verdict(1.0, 0.5, alone=None, at_random=0.1)).chance is None, "nobody searched without the update"


def test_above_chance_needs_the_whole_interval() -> None:
    assert judged(verdict(0.75, low=0.2, alone=0.1)).above_chance is True
    assert judged(verdict(0.75, low=0.1, alone=0.1)).above_chance is False
    assert judged(verdict(0.5, low=0.1, alone=None)).above_chance is None
    assert judged(verdict(0.25, low=0.02, alone=0.01)).above_chance is False, "one of four: a chance of 4%"


def test_many_images_are_judged_at_once() -> None:
    for images in (2000, 2**53):
        assert judged(verdict(0.5, low=0.45, alone=0.01, images=images)).above_chance is True


@pytest.mark.parametrize(
    ("grade", "share", "low", "alone", "outcome"),
    [
        ("A", 0.0, 0.0, 0.01, "holds"),
        ("B", 0.0, 0.0, 0.01, "holds"),
        *((grade, 0.0, 0.0, 0.01, "unknown") for grade in ("C", "D", "F", None)),
        ("B", 1.0, 0.5, 0.01, "leaks"),
        ("A", 0.0, 0.0, None, "unknown"),
    ],
)
def test_only_a_good_grade_holds(grade: str, share: float, low: float, alone: float | None, outcome: str) -> None:
    assert judged(verdict(share, low, alone, grade=grade)).outcome == outcome


@pytest.mark.parametrize(("size", "grades"), [(1, "AB"), (4, "CD"), (8, "DF")])
def test_zeros_get_the_grade_that_their_number_allows(
    size: int, grades: str, extremes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 images in 32, 8 and 4 updates. Ties used to go to private images, which stood first: grade F."""
    del extremes
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    case = {"data": "mnist-samples", "model": "mlp", "images": 32, "batch_size": size, "defenses": ["zeros"]}
    audit = run_case(make_case({**case, "attacks": ["identify", "analytic"][: 1 + (size == 1)]}), tmp_path / "audit")
    (verdict,) = audit.verdicts
    assert verdict.grade is not None
    assert verdict.grade in grades
    assert verdict.above_chance is False
    assert "no counter-move" not in verdict.flags, "every candidate gets the same reply"
    assert verdict.recognised is not None
    assert verdict.recognised.above_chance is False
    assert verdict.ceiling is not None
    assert verdict.ceiling.constant
