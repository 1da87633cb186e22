"""Defenses, one per file. Importing this package registers all of them."""

from gradveil.defenses import (  # noqa: F401  (each registers its own)
    ats,
    censor,
    clip,
    dcs2,
    dp,
    graddefense,
    noise,
    outpost,
    precode,
    soteria,
    sparsify,
)
from gradveil.defenses.base import Defense, Log, Step, Transform, check_result
from gradveil.defenses.chain import Chain, links_of
from gradveil.defenses.registry import DEFENSES

__all__ = ["DEFENSES", "Chain", "Defense", "Log", "Step", "Transform", "check_result", "links_of"]
