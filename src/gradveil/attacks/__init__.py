"""Attacks. Importing this package registers all of them."""

from gradveil.attacks import active, against, identify, informed  # noqa: F401  (each registers its own)
from gradveil.attacks.analytic import Analytic
from gradveil.attacks.base import (
    ATTACKS,
    BUDGETS,
    Attack,
    Budget,
    Crafted,
    Reconstruction,
    Server,
    finite_or_none,
    load_reconstructions,
    save_reconstructions,
)
from gradveil.attacks.generative import GGL, GIAS, GIFD
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.pixels import DLG, IDLG, SME, GradInversion, InvertingGradients

__all__ = [
    "ATTACKS",
    "BUDGETS",
    "DLG",
    "GGL",
    "GIAS",
    "GIFD",
    "IDLG",
    "SME",
    "Analytic",
    "Attack",
    "Budget",
    "Crafted",
    "GradInversion",
    "InvertingGradients",
    "Matching",
    "Reconstruction",
    "Server",
    "finite_or_none",
    "load_reconstructions",
    "save_reconstructions",
]
