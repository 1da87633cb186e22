"""How somebody who knows a defense attacks it: one file for each, under the defense's own name.

A file says what the defense did between gradient and reply (``channel``), which matching and identification both read,
and has its special counter-move where there is one. Importing this package registers all of them.
"""

from gradveil.attacks.against import (  # noqa: F401  (each registers its own)
    ats,
    censor,
    dcs2,
    graddefense,
    outpost,
    plain,
    precode,
    soteria,
)
from gradveil.attacks.parts.channel import Channel
from gradveil.attacks.parts.counter import AGAINST, Against, against

WITHOUT = {"none": "the gradient was sent as it is"}
"""Defenses that nobody has to do anything about, with the reason."""

__all__ = ["AGAINST", "WITHOUT", "Against", "Channel", "against"]
