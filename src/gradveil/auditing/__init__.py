"""Audits: a case with its digest, its run, its folder on disk, and the verdict."""

from gradveil.auditing.case import Case, Cell, make_case, read_case
from gradveil.auditing.run import run_case, score_again
from gradveil.auditing.scoring import MEANS

__all__ = ["MEANS", "Case", "Cell", "make_case", "read_case", "run_case", "score_again"]
