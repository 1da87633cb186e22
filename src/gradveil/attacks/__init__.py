"""Attacks. Importing this package registers all of them."""

from gradveil.attacks import analytic as _analytic  # noqa: F401  (registers)
from gradveil.attacks import presets as _presets  # noqa: F401  (registers)
from gradveil.attacks.base import ATTACKS, BUDGETS, Attack, Budget, Reconstruction
from gradveil.attacks.storage import load_reconstructions, save_reconstructions

__all__ = [
    "ATTACKS",
    "BUDGETS",
    "Attack",
    "Budget",
    "Reconstruction",
    "load_reconstructions",
    "save_reconstructions",
]
