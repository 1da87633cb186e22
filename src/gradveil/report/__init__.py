"""A saved audit as one self-contained HTML page. Reads files only: nothing here computes a metric or needs torch."""

from gradveil.report.page import render

__all__ = ["render"]
