"""The verdicts as a JUnit file, which continuous integration shows beside its other tests: one test per defense."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from gradveil.auditing.audit import Audit, Verdict
from gradveil.auditing.verdict import WORST
from gradveil.core.atomic import write_atomically

_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
"""Characters that no XML file may hold, but the name of a defense in a stranger's file might."""


def write_junit(audit: Audit, path: Path, bound: float | None = None) -> None:
    """Write one test case per defense. It fails above the bound on ``identified`` or, without one, on the worst grade.

    The text of a test is the verdict's sentence and its flags. What could not be measured is skipped.
    """
    found = audit.verdicts
    failed = [_fails(verdict, bound) for verdict in found]
    suite = ElementTree.Element(
        "testsuite",
        name="gradveil audit",
        tests=str(len(found)),
        failures=str(sum(failed)),
        errors="0",
        skipped=str(sum(verdict.identified is None for verdict in found)),
    )
    for verdict, fails in zip(found, failed, strict=True):
        seconds = sum(
            row.seconds or 0.0 for row in audit.rows if row.defense == verdict.defense and row.prior_of is None
        )
        test = ElementTree.SubElement(
            suite, "testcase", classname="gradveil.audit", name=_legal(verdict.defense), time=f"{seconds:.3f}"
        )
        if fails:
            message = f"grade {verdict.grade}: {verdict.identified:.0%} identified"
            ElementTree.SubElement(test, "failure", type="leak", message=message).text = _legal(_said(verdict))
        elif verdict.identified is None:
            ElementTree.SubElement(test, "skipped", message=_legal(verdict.sentence))
        else:
            ElementTree.SubElement(test, "system-out").text = _legal(f"Grade {verdict.grade}. {_said(verdict)}")
    write_atomically(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _fails(verdict: Verdict, bound: float | None) -> bool:
    if verdict.identified is None:
        return False
    return verdict.grade == WORST if bound is None else verdict.identified > bound


def _said(verdict: Verdict) -> str:
    flags = f" Flags: {', '.join(verdict.flags)}." if verdict.flags else ""
    return f"{verdict.sentence}{flags}"


def _legal(text: str) -> str:
    return _NOT_XML.sub("?", text)
