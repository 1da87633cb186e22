"""Reproductions: tables and figures of the papers as data, run at two scales, ours beside the paper's on a page."""

from gradveil.reproduction.catalogue import REPRODUCTIONS, reproduction
from gradveil.reproduction.expand import Plan, Planned, plan
from gradveil.reproduction.page import command, page
from gradveil.reproduction.run import run_here, run_plan
from gradveil.reproduction.table import PAPERS, SCALES, Column, Reproduction, Scale, Table, Word

__all__ = [
    "PAPERS",
    "REPRODUCTIONS",
    "SCALES",
    "Column",
    "Plan",
    "Planned",
    "Reproduction",
    "Scale",
    "Table",
    "Word",
    "command",
    "page",
    "plan",
    "reproduction",
    "run_here",
    "run_plan",
]
