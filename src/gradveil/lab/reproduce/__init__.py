"""Reproductions: tables and figures of the papers as data, run at two scales, ours beside the paper's on a page."""

from gradveil.lab.reproduce.page import command, page, values_of
from gradveil.lab.reproduce.plan import Planned, ReproductionPlan, measured_file, plan, run_plan
from gradveil.lab.reproduce.tables import (
    PAPERS,
    SCALES,
    Column,
    Reproduction,
    Scale,
    Table,
    Word,
    reproduction,
    reproductions,
)

__all__ = [
    "PAPERS",
    "SCALES",
    "Column",
    "Planned",
    "Reproduction",
    "ReproductionPlan",
    "Scale",
    "Table",
    "Word",
    "command",
    "measured_file",
    "page",
    "plan",
    "reproduction",
    "reproductions",
    "run_plan",
    "values_of",
]
