"""Defenses, one per file. Importing this package registers all of them."""

from gradveil.defenses.accounting import Ledger
from gradveil.defenses.ats import ATS
from gradveil.defenses.base import (
    DEFENSES,
    Chain,
    Defense,
    Log,
    Step,
    Transform,
    can_remember,
    check_model,
    check_result,
    defended_step,
    fresh,
    links_of,
)
from gradveil.defenses.censor import Censor
from gradveil.defenses.clip import Clip, ClipExamples
from gradveil.defenses.dcs2 import DCS2, DCS2Plus
from gradveil.defenses.dp import DP
from gradveil.defenses.graddefense import GradDefense
from gradveil.defenses.noise import Noise
from gradveil.defenses.outpost import Outpost
from gradveil.defenses.precode import Precode
from gradveil.defenses.public import PublicData
from gradveil.defenses.quantise import Quantise
from gradveil.defenses.soteria import Soteria
from gradveil.defenses.sparsify import Sparsify
from gradveil.defenses.topk import TopK
from gradveil.defenses.veil import Veil

__all__ = [
    "ATS", "DCS2", "DEFENSES", "DP", "Censor", "Chain", "Clip", "ClipExamples", "DCS2Plus", "Defense", "GradDefense",
    "Ledger", "Log", "Noise", "Outpost", "Precode", "PublicData", "Quantise", "Soteria", "Sparsify", "Step",
    "TopK", "Transform", "Veil",
    "can_remember", "check_model", "check_result", "defended_step", "fresh", "links_of",
]  # fmt: skip
