"""Is this broadcast crafted? What a client can see of a dishonest server before it trains on what that sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradveil.client.inspection.broadcast import PROBE, Finding, Inspection, Severity, look
from gradveil.client.inspection.checks import CHECKS
from gradveil.core.types import Batch, Recipe
from gradveil.domains import Domain

__all__ = ["CHECKS", "PROBE", "Finding", "Inspection", "Severity", "inspect"]


def inspect(
    module: nn.Module,
    sent: Mapping[str, Tensor],
    *,
    domain: Domain | None = None,
    previous: Mapping[str, Tensor] | None = None,
    probe: Batch | None = None,
    recipe: Recipe | None = None,
) -> Inspection:
    """Look for the marks of crafted broadcasts in the parameters ``sent`` for ``module``.

    ``probe`` is a batch that is not given away by looking: public images, or the client's own, since nothing of it
    leaves. Without one, ``domain`` is enough to draw stand-ins. ``previous`` is the last broadcast that was trusted.
    ``recipe`` says how far honest clients go in a round; without it, a learning rate of 1 is assumed.
    """
    with torch.no_grad():
        broadcast = look(module, sent, domain=domain, previous=previous, probe=probe, recipe=recipe)
        if CHECKS["not finite"](broadcast):
            known = (*CHECKS["not finite"](broadcast), *CHECKS["other layers"](broadcast))
            return Inspection(known, ("everything else: it would compute with NaN or infinity",))
        findings = tuple(finding for check in CHECKS.values() for finding in check(broadcast))
    left_out = []
    if broadcast.probe is None:
        left_out.append("what examples do in this model: give a probe, or the domain to draw one for")
    elif not broadcast.fits(broadcast.sent):
        left_out.append("what examples do in this model: the broadcast does not fit the model agreed on")
    if previous is None:
        left_out.append("what changed since the last broadcast: give the previous one")
    return Inspection(findings, tuple(left_out))
