"""Attacks. Importing this package registers all of them."""

from gradveil.attacks import active, analytic, generative, identification, presets  # noqa: F401  (each registers its own)
from gradveil.attacks.base import ATTACKS, BUDGETS, Attack, Budget, Crafted, Reconstruction, Server
from gradveil.attacks.storage import load_reconstructions, save_reconstructions

__all__ = [
    "ATTACKS",
    "BUDGETS",
    "Attack",
    "Budget",
    "Crafted",
    "Reconstruction",
    "Server",
    "load_reconstructions",
    "save_reconstructions",
]
