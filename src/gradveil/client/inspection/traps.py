"""Rows whose negative weights outweigh the positive ones by design, so that each fires for few examples (trap weights).

Training may well push rows below zero, dead ones far below, but each by an amount of its own. Only design makes the
balance of all rows the same, or the positive weights of a row a copy of its negative ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from gradveil.client.inspection.broadcast import Broadcast
from gradveil.client.inspection.findings import Finding

FEWEST = 16
SAMPLED = 64
"""Rows that are sorted: each tells the same story."""
MIRRORED = 10.0
SAME = 5.0
OFF_BALANCE = 0.05


def mirrored_rows(broadcast: Broadcast) -> Iterator[Finding]:
    for layer in broadcast.hidden:
        if min(layer.weight.shape) < FEWEST:
            continue
        rows = layer.weight[:: -(-layer.rows // SAMPLED)]
        # Sorted samples of one distribution differ by about 1 / sqrt(columns) of their size.
        too_close = 1 / max(float(_mirror_error(rows).median()) * math.sqrt(rows.shape[1]), 1e-9)
        if too_close > MIRRORED:
            yield Finding(
                check="mirrored rows",
                where=(f"{layer.name}.weight",),
                sentence=f"the positive weights of a row are its negative ones over again, {_times(too_close)} closer "
                "than chance makes them, as in rows that are scaled to fire for few examples",
                figure=too_close,
                bound=MIRRORED,
            )


def equal_balance(broadcast: Broadcast) -> Iterator[Finding]:
    for layer in broadcast.hidden:
        if min(layer.weight.shape) < FEWEST:
            continue
        # The sum of a row over its norm: for weights of random sign, 1 in size and different from row to row.
        balance = layer.weight.sum(dim=1) / layer.weight.norm(dim=1).clamp(min=1e-12)
        too_equal = 1 / max(float(balance.std()), 1e-9)
        if too_equal > SAME and float(balance.mean()) < -OFF_BALANCE:
            yield Finding(
                check="equal balance",
                where=(f"{layer.name}.weight",),
                sentence="negative weights outweigh positive ones in all rows, and by the same amount, "
                f"{_times(too_equal)} closer than chance makes it, so that each row fires for few examples",
                figure=too_equal,
                bound=SAME,
            )


def _mirror_error(rows: Tensor) -> Tensor:
    """How far the sorted positive weights of each row are from a multiple of the sorted negative ones, [rows]."""
    half = rows.shape[1] // 2
    rising = rows.sort(dim=1).values
    negative, positive = -rising[:, :half], rising.flip(1)[:, :half]
    factor = ((positive * negative).sum(dim=1) / negative.square().sum(dim=1).clamp(min=1e-24)).clamp(min=0)
    error: Tensor = (positive - factor[:, None] * negative).norm(dim=1) / positive.norm(dim=1).clamp(min=1e-12)
    return error


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio < 1000 else "a thousand times or more"
