"""Attacks. Importing this package registers all of them."""

from gradveil.attacks import against  # noqa: F401  (registers what is known of each defense)
from gradveil.attacks.active import Fishing, Imprinting, Trap
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
from gradveil.attacks.identify import Fingerprint, Identify
from gradveil.attacks.informed import Informed
from gradveil.attacks.learned import Learned
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.pixels import DLG, IDLG, SME, GradInversion, InvertingGradients
from gradveil.attacks.replay import Replay

__all__ = [
    "ATTACKS", "BUDGETS", "DLG", "GGL", "GIAS", "GIFD", "IDLG", "SME", "Analytic", "Attack", "Budget", "Crafted",
    "Fingerprint", "Fishing", "GradInversion", "Identify", "Imprinting", "Informed", "InvertingGradients", "Learned",
    "Matching", "Reconstruction", "Replay", "Server", "Trap", "finite_or_none", "load_reconstructions",
    "save_reconstructions",
]  # fmt: skip
