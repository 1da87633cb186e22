"""What luck explains and what it does not: exact tests at any number, whoever knows how many attacks were tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradveil.auditing import Row
from gradveil.auditing.audit import CeilingAnswer, Membership
from gradveil.auditing.chance import above_chance, at_least, label_luck, luck_of, member_luck
from gradveil.auditing.verdict import Ceilings, verdicts
from gradveil.metrics.statistics import interval


def row(attack: str, found: int, images: int, **more: Any) -> Row:
    """An attack that found so many of these images, one behind each update, in a line-up of 100."""
    shares = [{"index": i, "picture": i, "stopped": "", "identified": i < found} for i in range(images)]
    plain = {
        "defense": "mine", "attack": attack, "threat": "D", "images": images, "updates": images,
        "identified": found / images, "identified_interval": interval([i < found for i in range(images)]),
        "label_accuracy": 0.5, "gallery": 100, "at_random": 0.01, "per_image": shares,
        "needs": ("candidates",) if attack in ("identify", "replay") else (),
        "files": {"reconstruction": "found.safetensors"},
    }  # fmt: skip
    return Row(**{**plain, **more})


def alone(of: str, found: int, images: int) -> Row:
    return row("prior-only", found, images, prior_of=of)


@pytest.mark.parametrize(
    ("found", "images", "prior", "others", "above"),
    [
        (4, 4, 0, 0, True),
        (1, 4, 0, 0, True),
        (1, 4, 0, 3, False),  # one of four is luck where four attacks were tried
        (1, 32, 0, 0, False),
        (2, 4, 0, 9, True),
        (4, 4, 3, 0, None),  # the prior alone finds them, and four updates cannot tell the two apart
        (32, 32, 8, 0, True),
        (10, 32, 8, 0, False),
    ],
)
def test_above_chance(found: int, images: int, prior: int, others: int, above: bool | None) -> None:
    tried = [row("ig", found, images), *(row(f"gi:tv={i}", 0, images) for i in range(others))]
    assert above_chance(tried, [*tried, alone("ig", prior, images)])[0] is above


def test_luck_of_a_row_is_used_and_nothing_is_made_up_for_batches() -> None:
    assert luck_of(row("ig", 4, 4, luck=0.5)) == 0.5
    assert luck_of(row("ig", 1, 4)) == pytest.approx(at_least(1, 4, 0.01))
    batch = row("ig", 4, 8, updates=2)
    assert luck_of(batch) is None
    assert above_chance([batch], [batch]) == [None], "not known"


def test_attacks_on_nothing_are_seldom_above_chance() -> None:
    """Eight attacks whose picks know nothing, on 8 images of a line-up of 100: the best of them is shown."""
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(2000):
        tried = [row(f"ig:tv={i}", hits, 8) for i, hits in enumerate(rng.binomial(8, 0.01, size=8).tolist())]
        alarms += True in above_chance(tried, tried)
    assert alarms / 2000 <= 0.05


def test_labels_that_a_guess_gets_are_not_read() -> None:
    assert label_luck(row("ig", 0, 8, label_chance=None)) is None
    eight = label_luck(row("ig", 0, 8, label_accuracy=1.0, label_chance=0.1))
    assert eight == pytest.approx(1e-8)
    two = label_luck(row("ig", 0, 8, updates=2, label_accuracy=1.0, label_chance=0.1))
    assert two == pytest.approx(1e-2), "eight images of two updates stand or fall together"
    assert label_luck(row("ig", 0, 8, updates=2, label_accuracy=0.1, label_chance=0.1)) == 1.0


def test_members_go_by_the_luck_of_their_row() -> None:
    assert member_luck(row("identify", 0, 8)) is None
    assert member_luck(row("identify", 0, 8, member=Membership(found=1.0, luck=0.002))) == 0.002


MOVES = {"mine": "It undoes it."}


@pytest.mark.parametrize(
    ("attacks", "moves", "grade", "flags"),
    [
        (["ig"], None, "C", ["no counter-move", "no candidates"]),
        (["ig"], MOVES, "C", ["no candidates"]),
        (["ig", "replay"], None, "C", ["no counter-move"]),
        (["ig", "replay"], {"mine": "It undoes it.", "yours": None}, "C", ["no counter-move"]),
        (["ig", "replay"], MOVES, "A", []),
        (["identify"], MOVES, "A", []),
    ],
)
def test_a_good_grade_takes_candidates_and_a_counter_move(
    attacks: list[str], moves: dict[str, str | None] | None, grade: str, flags: list[str]
) -> None:
    rows = [row(attack, 0, 100, counter_moves=moves if i == 0 else None) for i, attack in enumerate(attacks)]
    (verdict,) = verdicts(rows)
    assert verdict.grade == grade
    assert list(verdict.flags) == flags
    assert ("No attack held a list of candidates." in verdict.sentence) == ("no candidates" in flags)


def test_no_defense_needs_no_counter_move() -> None:
    (verdict,) = verdicts([row("replay", 8, 8, defense="none")])
    assert (verdict.grade, verdict.flags) == ("F", ())


@pytest.mark.parametrize(
    ("proved", "grade", "flags"), [(0.05, "A", ()), (0.2, "B", ()), (0.9, "C", ("no counter-move",))]
)
def test_a_ceiling_carries_a_grade(proved: float, grade: str, flags: tuple[str, ...]) -> None:
    ceiling = CeilingAnswer(recognised=proved, chance=0.01, member=0.1)
    (verdict,) = verdicts([row("identify", 0, 8)], None, {"mine": Ceilings(ceiling)})
    assert (verdict.grade, verdict.flags) == (grade, flags), "by eight images alone it is a C"
    assert verdict.ceiling == ceiling


def test_the_answers_of_a_verdict() -> None:
    member = Membership(found=0.5, interval=(0.2, 0.8), luck=0.001, advantage=0.5, members=8, others=8)
    ranked = row("identify", 8, 8, member=member, label_accuracy=1.0, label_chance=0.1)
    read = row("ig", 2, 8, label_accuracy=0.75, label_interval=(0.3, 0.9), label_chance=0.1)
    (verdict,) = verdicts([ranked, read, alone("ig", 0, 8)], people=True)
    answers = (verdict.rebuilt, verdict.recognised, verdict.member, verdict.labels)
    assert [answer.share for answer in answers if answer is not None] == [0.25, 1.0, 0.5, 0.75]
    assert [answer.above_chance for answer in answers if answer is not None] == [True, True, True, True]
    assert verdict.ceiling is not None
    assert verdict.ceiling.why
    assert "75% of the people were named by their label, and 10% by a guess without the update." in verdict.sentence
    granted = [one.model_copy(update={"threat": "D+labels"}) for one in (ranked, read)]
    (given,) = verdicts(granted, people=True)
    assert given.labels is not None
    assert (given.labels.share, given.labels.why) == (None, "the adversary was given the labels")
    (only,) = verdicts([ranked])
    assert only.labels is not None
    assert only.labels.share is None, "a label that comes with a candidate is read off the list"
