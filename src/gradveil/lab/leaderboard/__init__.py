"""The leaderboard: every defense on the same fixed settings, as a page made of one small file for each."""

from gradveil.lab.leaderboard.entries import Audited, Entry, Trained, enter, merged, read_entries, save_entry
from gradveil.lab.leaderboard.page import Line, render_leaderboard
from gradveil.lab.leaderboard.settings import SEEDS, SETTINGS, Setting, settings_named

__all__ = [
    "SEEDS",
    "SETTINGS",
    "Audited",
    "Entry",
    "Line",
    "Setting",
    "Trained",
    "enter",
    "merged",
    "read_entries",
    "render_leaderboard",
    "save_entry",
    "settings_named",
]
