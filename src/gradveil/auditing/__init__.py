"""Audits: a case with its digest, its run, its folder on disk, and the verdict."""

from gradveil.auditing.again import score_again
from gradveil.auditing.case import Case, Cell, ObservedCase, make_case, make_observed_case, read_case
from gradveil.auditing.junit import write_junit
from gradveil.auditing.observed import run_observed
from gradveil.auditing.run import run_case
from gradveil.auditing.scoring import MEANS

__all__ = [
    "MEANS",
    "Case",
    "Cell",
    "ObservedCase",
    "make_case",
    "make_observed_case",
    "read_case",
    "run_case",
    "run_observed",
    "score_again",
    "write_junit",
]
