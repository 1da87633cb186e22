"""Defenses, one per file. Importing this package registers all of them."""

from gradveil.defenses import noise as _noise  # noqa: F401  (registers)
from gradveil.defenses.base import Defense, Log, Step, Transform
from gradveil.defenses.chain import Chain
from gradveil.defenses.registry import DEFENSES

__all__ = ["DEFENSES", "Chain", "Defense", "Log", "Step", "Transform"]
