"""Audits: a case with its digest, its run, its folder on disk, and the verdict.

Names are loaded when first asked for, because the record of an audit serves reports, which are made without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradveil.auditing.audit import Audit, Cost, ImageScore, Row, Verdict, read_audit

if TYPE_CHECKING:
    from gradveil.auditing.case import Case as Case
    from gradveil.auditing.case import ObservedCase as ObservedCase
    from gradveil.auditing.case import make_case as make_case
    from gradveil.auditing.case import make_observed_case as make_observed_case
    from gradveil.auditing.case import read_case as read_case
    from gradveil.auditing.gate import AuditGate as AuditGate
    from gradveil.auditing.gate import write_junit as write_junit
    from gradveil.auditing.run import run_case as run_case
    from gradveil.auditing.run import run_observed as run_observed
    from gradveil.auditing.run import score_again as score_again
    from gradveil.auditing.scoring import MEANS as MEANS

_WHERE = {
    "case": ("Case", "ObservedCase", "make_case", "make_observed_case", "read_case"),
    "gate": ("AuditGate", "write_junit"),
    "run": ("run_case", "run_observed", "score_again"),
    "scoring": ("MEANS",),
}
_LATER = tuple(name for names in _WHERE.values() for name in names)
__all__ = ["Audit", "Cost", "ImageScore", "Row", "Verdict", "read_audit", *_LATER]


def __getattr__(name: str) -> Any:
    for file, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
