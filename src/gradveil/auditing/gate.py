"""The gate: what an audit must not pass, for continuous integration, and the verdicts as a JUnit file.

It fails closed: what is not known is a violation. Nothing here loads torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from xml.etree import ElementTree

from gradveil.auditing.audit import Answer, Audit, Verdict
from gradveil.auditing.verdict import GRADES, WORST
from gradveil.core.atomic import write_atomically
from gradveil.core.errors import GradveilError

ASKED = ("identified", "recognised", "rebuilt", "member", "labels")
"""What can be bounded: the worst case of all attacks, or one of the answers."""
LETTERS = (*GRADES["privacy"], WORST)
BASELINE = "none"
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
"""Characters that no XML file may hold, but the name of a defense in a stranger's file might."""


@dataclass(frozen=True)
class Violation:
    """One thing that the gate does not let pass."""

    defense: str
    words: str

    def annotation(self) -> str:
        """As a line that GitHub shows beside the code."""
        title = _escaped(f"gradveil audit: {self.defense}").replace(":", "%3A").replace(",", "%2C")
        return f"::error title={title}::{_escaped(self.words)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


UNFINISHED = Violation("audit", "the audit is not complete: go on with --resume")


@dataclass(frozen=True)
class AuditGate:
    """Bounds on what may leak under every defense."""

    bounds: Mapping[str, float] = field(default_factory=dict)
    """By what was asked, the largest share that passes."""
    grade: str | None = None
    """The worst grade that passes."""
    point: bool = False
    """Whether the estimate counts, rather than the upper end of its interval."""
    baseline: bool = False
    """Whether clients without a defense have to pass as well."""

    @classmethod
    def read(
        cls, bounds: Sequence[str], grade: str | None = None, *, point: bool = False, baseline: bool = False
    ) -> Self:
        """From texts such as ``identified=0.1`` and ``B``; of several bounds on the same, the lowest counts."""
        found: dict[str, float] = {}
        for text in bounds:
            asked, equals, value = text.partition("=")
            try:
                if asked not in ASKED or not equals or "_" in value or not 0 <= float(value) <= 1:
                    raise ValueError  # to float(), 0_1 is 1
            except ValueError:
                raise GradveilError(
                    f"cannot read the bound {text!r}; write --fail-above identified=0.1, a share from 0 to 1 of "
                    f"{', '.join(ASKED)}"
                ) from None
            found[asked] = min(float(value), found.get(asked, 1.0))
        letter = None if grade is None else grade.upper()
        if letter is not None and letter not in LETTERS:
            raise GradveilError(f"there is no grade {grade!r}; grades are {', '.join(LETTERS)}")
        if point and not found:
            raise GradveilError("--point says how --fail-above judges: name a bound with --fail-above METRIC=VALUE")
        if baseline and not found and letter is None:
            raise GradveilError("--gate-none needs a gate: add --fail-above METRIC=VALUE or --require-grade GRADE")
        return cls(found, letter, point, baseline)

    def __bool__(self) -> bool:
        return bool(self.bounds) or self.grade is not None

    def violations(self, audit: Audit) -> list[Violation]:
        """All of them. Defenses that were left out, and an audit without any defense to judge, do not pass."""
        if not self:
            return []
        found = [Violation(name, f"it was not audited: {why}") for name, why in audit.left_out.items()]
        judged = [one for one in audit.verdicts if self.baseline or one.defense != BASELINE]
        if not judged and not found:
            words = "no defense was audited: name one with --defense, or judge the baseline with --gate-none"
            found.append(Violation(BASELINE, words))
        if not audit.complete:
            found.append(UNFINISHED)
        for verdict in judged:
            found += [Violation(verdict.defense, words) for words in self._said_of(verdict)]
            own = [row for row in audit.rows if row.defense == verdict.defense and not row.is_prior]
            blind = [row for row in own if row.identified is None]
            if blind and verdict.identified is not None:  # part of it is known
                words = f"{len(blind)} of {len(own)} rows were not scored: there is no truth for them"
                found.append(Violation(verdict.defense, words))
        return found

    def _said_of(self, verdict: Verdict) -> list[str]:
        found = []
        for asked, bound in self.bounds.items():
            answer = _answer(verdict, asked)
            most = _most(answer, verdict, asked, point=self.point)
            if most is None:
                why = answer.why if answer.share is None else "its interval was not measured"
                reason = f": {why}" if why else ""
                found.append(f"{asked} is not known under {verdict.defense}{reason}; it must not be above {bound:g}")
            elif most > bound:
                end = "" if self.point or most == answer.share else f" at the upper end ({answer.share:.3g} measured)"
                found.append(f"{asked} is {most:.3g}{end} under {verdict.defense}, above {bound:g}")
        if self.grade is not None and verdict.grade not in LETTERS[: LETTERS.index(self.grade) + 1]:
            graded = "not graded" if verdict.grade is None else f"graded {verdict.grade}"
            flags = f" ({', '.join(verdict.flags)})" if verdict.flags else ""
            found.append(f"{verdict.defense} is {graded}{flags}, and {self.grade} is required")
        return found


def _answer(verdict: Verdict, asked: str) -> Answer:
    if asked == "identified":
        return Answer(share=verdict.identified, interval=verdict.identified_interval)
    found: Answer | None = getattr(verdict, asked)
    return Answer(why="this audit did not ask for it") if found is None else found


def _most(answer: Answer, verdict: Verdict, asked: str, *, point: bool) -> float | None:
    """The estimate, or the most that can happen: the upper end of the interval, or the ceiling where that is lower."""
    if answer.share is None or answer.interval is None or point:
        return answer.share if point else None
    proved = None
    if verdict.ceiling is not None and asked != "labels":
        proved = verdict.ceiling.member if asked == "member" else verdict.ceiling.recognised
    return answer.interval[1] if proved is None else min(answer.interval[1], max(proved, answer.share))


def write_junit(audit: Audit, path: Path, gate: AuditGate | None = None) -> None:
    """Write one test case per defense, which continuous integration shows beside its other tests.

    It fails as the gate says or, without one, on the worst grade, which the baseline is allowed. The text of a test is
    the verdict's sentence and its flags. Without a gate, what could not be measured is skipped. An audit that is not
    complete fails by itself.
    """
    gate = gate or AuditGate()
    said: dict[str, list[str]] = {} if gate or audit.complete else {UNFINISHED.defense: [UNFINISHED.words]}
    for one in gate.violations(audit):
        said.setdefault(one.defense, []).append(one.words)
    known = {verdict.defense: verdict for verdict in audit.verdicts}
    suite = ElementTree.Element("testsuite", name="gradveil audit", errors="0")
    for defense in dict.fromkeys([*known, *audit.left_out, *said]):
        verdict, failures = known.get(defense), said.get(defense, [])
        rows = [row for row in audit.rows if row.defense == defense and row.prior_of is None]
        name, seconds = _NOT_XML.sub("?", defense), sum(row.seconds or 0.0 for row in rows)
        test = ElementTree.SubElement(suite, "testcase", classname="gradveil.audit", name=name, time=f"{seconds:.3f}")
        text = audit.left_out.get(defense, "") if verdict is None else _said(verdict)
        if not gate and verdict is not None and verdict.grade == WORST and defense != BASELINE:
            labels = verdict.labels.share if audit.labels_are_people and verdict.labels else None
            named = "" if labels is None else f", {labels:.0%} named by their label"
            failures = [f"grade {WORST}: {verdict.identified or 0:.0%} identified{named}"]
        if failures:
            message = _NOT_XML.sub("?", "; ".join(failures))
            ElementTree.SubElement(test, "failure", type="leak", message=message).text = _NOT_XML.sub("?", text)
        elif verdict is None or verdict.grade is None:
            ElementTree.SubElement(test, "skipped", message=_NOT_XML.sub("?", text))
        else:
            ElementTree.SubElement(test, "system-out").text = _NOT_XML.sub("?", f"Grade {verdict.grade}. {text}")
    for kind, tag in (("tests", "testcase"), ("failures", "testcase/failure"), ("skipped", "testcase/skipped")):
        suite.set(kind, str(len(suite.findall(tag))))
    write_atomically(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _said(verdict: Verdict) -> str:
    flags = f" Flags: {', '.join(verdict.flags)}." if verdict.flags else ""
    return f"{verdict.sentence}{flags}"
