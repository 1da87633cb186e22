"""How somebody who knows a defense attacks it.

A file says what the defense did between gradient and reply (``channel``), which matching and identification both read,
and has its special counter-move. Defenses without one share ``plain``. Importing this package registers all of them.
"""

from gradveil.attacks.against import (  # noqa: F401  (each registers its own)
    ats,
    censor,
    dcs2,
    graddefense,
    plain,
    precode,
)
from gradveil.attacks.parts.channel import Channel
from gradveil.attacks.parts.counter import AGAINST, Against, against

WITHOUT = {"none": "the gradient was sent as it is"}
"""Defenses that nobody has to do anything about, with the reason."""

__all__ = ["AGAINST", "WITHOUT", "Against", "Channel", "against"]
