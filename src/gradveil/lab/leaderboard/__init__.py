"""The leaderboard: every defense on the same fixed settings, as a page made of one small file for each."""

from gradveil.lab.leaderboard.entries import Entry, Told, Trained, Worst, enter, read_entries, save_entry
from gradveil.lab.leaderboard.page import render_leaderboard
from gradveil.lab.leaderboard.settings import SETTINGS, SHOWN, Setting, settings_named

__all__ = [
    "SETTINGS",
    "SHOWN",
    "Entry",
    "Setting",
    "Told",
    "Trained",
    "Worst",
    "enter",
    "read_entries",
    "render_leaderboard",
    "save_entry",
    "settings_named",
]
