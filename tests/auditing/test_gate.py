"""The gate: bounds on the upper end, every violation, and nothing that is not known passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gradveil.auditing import Audit, AuditGate, Verdict, write_junit
from gradveil.auditing.audit import Answer, CeilingAnswer
from gradveil.auditing.gate import Violation
from gradveil.core.errors import GradveilError


def verdict(defense: str = "mine", share: float | None = 0.0, upper: float = 0.6, **more: Any) -> Verdict:
    interval = None if share is None else (0.0, upper)
    plain = {"defense": defense, "identified": share, "identified_interval": interval, "grade": "C", "sentence": "So."}
    return Verdict(**{**plain, **more})


def said(gate: AuditGate, *verdicts: Verdict, **more: Any) -> list[str]:
    return [one.words for one in gate.violations(Audit(rows=(), verdicts=verdicts, **more))]


def test_the_upper_end_counts_unless_the_point_is_asked_for() -> None:
    assert said(AuditGate.read(["identified=0.1"]), verdict()) == [
        "identified is 0.6 at the upper end (0 measured) under mine, above 0.1"
    ]
    assert said(AuditGate.read(["identified=0.1"], point=True), verdict()) == []
    assert said(AuditGate.read(["identified=0.1"], point=True), verdict(share=0.2)) == [
        "identified is 0.2 under mine, above 0.1"
    ]


def test_a_ceiling_counts_where_it_is_lower() -> None:
    proved = verdict(ceiling=CeilingAnswer(recognised=0.05, member=0.05))
    assert said(AuditGate.read(["identified=0.1"]), proved) == []


def test_all_violations_are_named() -> None:
    leaking = verdict("one", 0.5, rebuilt=Answer(share=0.5, interval=(0.2, 0.8)), flags=("no counter-move",))
    found = said(AuditGate.read(["identified=0.1", "rebuilt=0.1", "labels=0.5"], "b"), leaking, verdict("two"))
    assert len(found) == 8
    assert "labels is not known under one: this audit did not ask for it; it must not be above 0.5" in found
    assert "one is graded C (no counter-move), and B is required" in found
    assert [line for line in found if "two" in line]


def test_the_baseline_is_judged_on_request_only() -> None:
    both = (verdict("none", 1.0, 1.0), verdict(upper=0.05))
    assert said(AuditGate.read(["identified=0.1"]), *both) == []
    assert len(said(AuditGate.read(["identified=0.1"], baseline=True), *both)) == 1


def test_what_is_not_known_does_not_pass() -> None:
    gate = AuditGate.read(["identified=1", "member=1"], "F")
    assert len(said(gate, verdict(share=None, grade=None))) == 3
    asked = verdict(member=Answer(why="no attack was asked"))
    assert said(gate, asked) == ["member is not known under mine: no attack was asked; it must not be above 1"]
    assert said(AuditGate.read(["identified=1"]), verdict("none")) != [], "nothing was judged"
    assert said(AuditGate.read(["identified=1"]), verdict(), left_out={"dp": "batch norm"}) == [
        "it was not audited: batch norm"
    ]
    assert said(AuditGate.read(["identified=1"]), verdict(), complete=False) != []
    assert said(AuditGate(), verdict(share=None), left_out={"dp": "batch norm"}) == [], "no gate, no violation"


@pytest.mark.parametrize("text", ["identified", "psnr=0.1", "identified=2", "identified=x", "identified=nan", "=0.1"])
def test_a_bound_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(GradveilError, match="cannot read the bound"):
        AuditGate.read([text])
    with pytest.raises(GradveilError, match="no grade 'E'"):
        AuditGate.read([], "E")


def test_annotations_are_one_line() -> None:
    one = Violation("clip:bound=1,per=example", "100% leaks\nreally")
    assert one.annotation() == ("::error title=gradveil audit%3A clip%3Abound=1%2Cper=example::100%25 leaks%0Areally")


def test_junit_fails_as_the_gate_does(tmp_path: Path) -> None:
    audit = Audit(rows=(), verdicts=(verdict("none", 1.0, 1.0, grade="F"), verdict()), left_out={"dp": "batch norm"})
    write_junit(audit, tmp_path / "a.xml", AuditGate.read(["identified=0.1"], "B"))
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    failures = {str(test.get("name")): test.find("failure") for test in suite.iter("testcase")}
    assert failures["none"] is None
    assert failures["mine"] is not None
    assert failures["dp"] is not None
    assert "above 0.1; mine is graded C" in str(failures["mine"].get("message"))
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    write_junit(audit, tmp_path / "a.xml")
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1"), "the baseline may leak"
