"""Is this broadcast crafted? What a client can see of a dishonest server before it trains on what that sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradveil.client.inspection.biases import bias_ladder, decisive_bias
from gradveil.client.inspection.broadcast import fits, in_float32, look
from gradveil.client.inspection.changes import moved_alone, not_finite, other_layers, unchanged
from gradveil.client.inspection.findings import Finding, Inspection, Severity
from gradveil.client.inspection.rows import copied_rows
from gradveil.client.inspection.shares import one_class_speaks, silent_rows, uneven_rows
from gradveil.client.inspection.traps import equal_balance, mirrored_rows
from gradveil.core.types import Batch, Domain, Recipe

__all__ = ["CHECKS", "Finding", "Inspection", "Severity", "inspect"]

LOOKS = (
    copied_rows, bias_ladder, mirrored_rows, equal_balance,
    decisive_bias, silent_rows, uneven_rows, one_class_speaks, unchanged, moved_alone,
)  # fmt: skip
"""Every check of a broadcast whose numbers are finite."""
CHECKS = tuple(check.__name__.replace("_", " ") for check in (not_finite, other_layers, *LOOKS))


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
    sent, previous = in_float32(sent), None if previous is None else in_float32(previous)
    findings = [*not_finite({**sent, **dict(module.named_buffers())}), *other_layers(module, sent, previous)]
    if any(finding.check == "not finite" for finding in findings):
        return Inspection(tuple(findings), ("everything else: it would compute with NaN or infinity",))
    with torch.no_grad():
        broadcast = look(module, sent, domain=domain, previous=previous, probe=probe, recipe=recipe)
        findings += [finding for check in LOOKS for finding in check(broadcast)]
    left_out = []
    if broadcast.probe is None:
        left_out.append("what examples do in this model: give a probe, or the domain to draw one for")
    elif not fits(module, sent):
        left_out.append("what examples do in this model: the broadcast does not fit the model agreed on")
    if previous is None:
        left_out.append("what changed since the last broadcast: give the previous one")
    return Inspection(tuple(findings), tuple(left_out))
