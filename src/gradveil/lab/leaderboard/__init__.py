"""The leaderboard: every defense on the same fixed settings, as a page made of one small file for each."""

from gradveil.lab.leaderboard.settings import SEEDS, SETTINGS, Setting, settings_named

__all__ = ["SEEDS", "SETTINGS", "Setting", "settings_named"]
