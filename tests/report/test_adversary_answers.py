"""What a report recommends is never against its own numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gradveil.auditing import Audit, Verdict
from gradveil.auditing.audit import Answer, CeilingAnswer
from gradveil.auditing.verdict import GRADES
from gradveil.report import words
from gradveil.report.answers import answers, recommendations

CASE = {"data": "cifar10-samples", "model": "lenet", "threat": "D", "images": 4, "batch_size": 1, "budget": "quick"}
LEAKS: dict[str, Any] = {"above_chance": True, "outcome": "leaks", "grade": "F", "identified": 1.0}
UNKNOWN: dict[str, Any] = {"above_chance": False, "outcome": "unknown", "grade": "D", "identified": 0.0}
HOLDS: dict[str, Any] = {"above_chance": False, "outcome": "holds", "grade": "A", "identified": 0.0}
READ, UNREAD = (Answer(share=share, chance=0.1, above_chance=share == 1.0) for share in (1.0, 0.0))


def verdict(defense: str, **more: Any) -> Verdict:
    return Verdict(**{"defense": defense, "images": 4, "at_random": 0.01, "threat": "D", **more})


def advised(*verdicts: Verdict, **more: Any) -> str:
    made = Audit(**{"case": dict(CASE), "rows": (), "verdicts": verdicts, "grades": GRADES, **more})
    return "\n".join(f"{one.why} > {one.command}" for one in recommendations(made))


STATES = list(
    itertools.product(
        (LEAKS, UNKNOWN, HOLDS),
        (None, CeilingAnswer(recognised=0.6, chance=0.01), CeilingAnswer(why="nothing is noised")),
        ((), ("no counter-move",), ("no candidates",), ("prior-only as good",)),
        (None, READ, UNREAD, Answer(why="the adversary was given the labels")),
    )
)


@pytest.mark.parametrize("first", ["none", "a"])
def test_nothing_that_is_advised_is_against_the_numbers(first: str) -> None:
    """Every state of two defenses, one after another: 2 x 144 x 12 audits."""
    for one, other in itertools.product(STATES, STATES[::12]):
        state, top, flags, labels = one
        both = [
            verdict(first, **state, ceiling=top, flags=flags, labels=labels),
            verdict("b", **other[0], ceiling=other[1], flags=other[2], labels=other[3]),
        ]
        said, tried = advised(*both), [each for each in both if each.defense != "none"]
        if " held." in said:
            held = said.partition("Of what was tried, ")[2].partition(" held.")[0].split(", ")
            assert all(each.outcome == "holds" for each in tried if each.defense in held)
        if "nothing tried has a proven ceiling" in said:
            assert not any(each.ceiling and each.ceiling.recognised for each in tried)
        for each in tried:
            for line in said.splitlines():
                names = line.partition("With ")[2].partition(", ")[0]
                if each.defense == names and "found no more than chance" in line:
                    assert not each.above_chance
                if each.defense == names and "limited by the number of images" in line:
                    assert each.grade not in ("A", "C") or not each.flags
        if "No defense tried" in said:
            assert not any(each.labels and each.labels.above_chance is False for each in tried)


def test_a_defense_that_does_not_fit_the_model_is_not_proposed_again() -> None:
    said = advised(verdict("noise", **LEAKS), left_out={"veil": "batch norm mixes examples"})
    assert "veil" not in said
    assert "private examples were found more often than chance" in said


def test_what_held_against_a_weaker_adversary_is_no_way_out() -> None:
    weaker = verdict("b", **{**HOLDS, "threat": "A"})
    assert "held" not in advised(verdict("a", **LEAKS), weaker)
    assert "b held" in advised(verdict("a", **LEAKS), verdict("b", **HOLDS))


def test_members_that_are_found_are_not_called_found_examples() -> None:
    said = advised(verdict("a", **{**HOLDS, "outcome": "leaks"}, member=Answer(share=1.0, above_chance=True)))
    assert "members were told from others" in said
    assert "private examples were found" not in said


def test_more_images_than_there_are_samples_come_from_the_whole_set() -> None:
    said = advised(verdict("a", **UNKNOWN), case={**CASE, "batch_size": 8})
    assert "--data cifar10:split=test" in said
    assert "--data cifar10-samples" in advised(verdict("a", **UNKNOWN))


def test_more_images_are_not_advised_where_they_cannot_help() -> None:
    flagged = {"flags": ("no counter-move",)}
    assert "limited by the number" not in advised(verdict("a", **{**UNKNOWN, "grade": "C"}, **flagged))
    assert "limited by the number" in advised(verdict("a", **UNKNOWN, **flagged)), "up to C they can"


def test_a_share_above_its_ceiling_is_called_luck() -> None:
    found = Answer(share=0.4, interval=(0.1, 0.7), chance=0.01, above_chance=False)
    shown = answers(verdict("dp", **UNKNOWN, recognised=found, ceiling=CeilingAnswer(recognised=0.3)))[1]
    assert "no attack passes 30% on average, so that more was luck" in shown.words


def test_only_the_baseline_hides_nothing_and_no_defense_is_blamed() -> None:
    said = advised(verdict("none", **LEAKS, labels=READ))
    assert "labels were read more often than chance. >" in said


def test_people_that_a_guess_names_as_well_are_told_beside_the_guess() -> None:
    lucky = Answer(share=0.1, chance=0.1, above_chance=False)
    assert "10% were named with a, where a guess names 10%." in words.headline(
        [verdict("a", **UNKNOWN, labels=lucky)], people=True
    )


@pytest.mark.parametrize(("threat", "told"), [("D", False), ("E", True), ("C+labels", True)])
def test_a_proposed_ceiling_is_one_that_the_command_can_have(threat: str, told: bool) -> None:
    said = advised(verdict("a", **LEAKS), case={**CASE, "threat": threat})
    assert "--threat D " in said
    assert ("none are given here" in said) is told
