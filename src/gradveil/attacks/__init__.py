"""Attacks. Importing this package registers all of them."""

from gradveil.attacks import (  # noqa: F401  (each registers its own)
    active,
    against,
    analytic,
    generative,
    identify,
    informed,
    presets,
)
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
