"""The leaderboard: every defense on the same fixed settings, as a page made of one small file for each."""

from gradveil.studies.leaderboard.entries import Entry, Trained, Worst, read_entries, save_entry
from gradveil.studies.leaderboard.page import render_leaderboard
from gradveil.studies.leaderboard.running import enter
from gradveil.studies.leaderboard.settings import SETTINGS, SHOWN, Setting, settings_named

__all__ = [
    "SETTINGS",
    "SHOWN",
    "Entry",
    "Setting",
    "Trained",
    "Worst",
    "enter",
    "read_entries",
    "render_leaderboard",
    "save_entry",
    "settings_named",
]
