"""Defenses, one per file. Importing this package registers all of them."""

from gradveil.defenses import noise as _noise  # noqa: F401  (registers)
from gradveil.defenses.base import DEFENSES, Defense, Log, Step

__all__ = ["DEFENSES", "Defense", "Log", "Step"]
