"""The fingerprint that CENSOR leaves: candidates ranked by the norms of their tensors, and by right angles."""

from __future__ import annotations

from functools import partial

from gradveil.attacks.base import ATTACKS, Attack, Budget
from gradveil.attacks.identification.attack import Identify
from gradveil.attacks.identification.informed import marks_for
from gradveil.attacks.identification.marks import By


@ATTACKS.register("fingerprint")
def fingerprint(budget: Budget, *, by: By = "norms", candidates: str | None = None) -> Attack:  # noqa: ARG001
    """CENSOR's fingerprint: the candidate whose gradient has the update's norms, or stands at right angles to it."""
    return Identify(title=f"fingerprint by {by}", likeness=partial(marks_for, by=by), candidates=candidates)
