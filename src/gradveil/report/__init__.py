"""Saved audits and trainings as self-contained HTML pages. Reads files only: nothing here needs torch."""

from gradveil.report.page import render, render_trainings

__all__ = ["render", "render_trainings"]
