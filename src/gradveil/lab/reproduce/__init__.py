"""Reproductions: the papers' tables and figures as data, run as text or release say, ours and theirs on one page."""

from gradveil.lab.reproduce.page import command, page, values_of
from gradveil.lab.reproduce.plan import Planned, ReproductionPlan, measured_file, plan, run_plan
from gradveil.lab.reproduce.tables import (
    PAPERS,
    SCALES,
    SETTINGS,
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
    "SETTINGS",
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
