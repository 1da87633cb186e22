"""The studies behind claims about CENSOR: they are about claims that exist, and two of them measure what they say."""

import json

import pytest
from censor_claims import STUDIES, across, labels_left, one_for_many, points_of, seen
from claims import ROOT, claims

ROWS = [json.loads(line) for line in (ROOT / "docs/results/censor-claims.jsonl").read_text().splitlines()]


def test_studies_are_about_claims_of_the_paper() -> None:
    known = {one.id for one in claims("censor")}
    assert {claim for about, _, _ in STUDIES.values() for claim in about} <= known


def test_every_committed_row_is_a_point_of_a_study_and_none_is_there_twice() -> None:
    points = [(name, json.dumps(point, sort_keys=True)) for name, point in points_of([*STUDIES])]
    assert len(points) == len(set(points))
    rows = [(row["study"], json.dumps(row["settings"], sort_keys=True)) for row in ROWS]
    assert set(rows) <= set(points)
    assert len({(*row, one["device"]) for row, one in zip(rows, ROWS, strict=True)}) == len(ROWS)


def test_across_is_every_combination() -> None:
    assert across(a=[1, 2], b=["x"]) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]


def test_a_part_of_the_gradient_gives_labels_away() -> None:
    without, much = (labels_left("cpu", model="lenet", share=share)["labels_right"] for share in (0, 0.3))
    assert without < 0.5 < much


def test_one_client_stands_for_many_without_a_defense_only() -> None:
    found = {defense: one_for_many("cpu", defense=defense, others=8) for defense in ("none", "censor")}
    assert found["none"]["distance"] < 1e-4
    assert found["censor"]["distance"] > 0.5


def test_a_smaller_broadcast_makes_algorithm_1_send_the_gradient() -> None:
    rates = [
        seen("censor:fallback=original", model="lenet:init=wide", images=4, device="cpu", scale=scale)[1].means()
        for scale in (1.0, 0.05)
    ]
    assert rates[0]["fallback_rate"] < 0.5 < rates[1]["fallback_rate"]
    assert rates[1]["cosine"] == pytest.approx(1)
