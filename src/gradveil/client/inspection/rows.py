"""Rows of a layer that are copies of each other: one linear query asked many times over, as Imprint does."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.client.inspection.broadcast import ROWS, Broadcast, Linear
from gradveil.client.inspection.findings import Finding
from gradveil.core.seeding import generator

PARALLEL = 0.95
"""The cosine from which two rows count as one: room for a fifth of noise on each."""
SHARE = 0.5
FEWEST_COLUMNS = 16
"""Narrower rows may be parallel by chance."""


def copied_rows(broadcast: Broadcast) -> Iterator[Finding]:
    for layer in broadcast.hidden:
        if not _reads_inputs(layer, broadcast) or layer.weight.shape[1] < FEWEST_COLUMNS:
            continue
        share = float(_has_twin(layer.weight).float().mean())
        if share > SHARE:
            yield Finding(
                check="copied rows",
                where=(layer.name,),
                sentence=f"{share:.0%} of its {layer.rows} rows are multiples of another row (honest: none), so that "
                "examples can be told apart by the difference of two rows' gradients",
                figure=share,
                bound=SHARE,
            )


def _reads_inputs(layer: Linear, broadcast: Broadcast) -> bool:
    """Whether all of an input arrives at a layer. In later ones a single large step makes honest rows parallel."""
    if broadcast.probe is None:
        return layer is broadcast.hidden[0]
    return layer.weight.shape[1] == broadcast.probe.inputs[0].numel()


def _has_twin(weight: Tensor) -> Tensor:
    """Which rows are multiples of another one, [rows]: sorted along any direction, such rows are neighbours."""
    weight = weight[:: -(-len(weight) // ROWS)]
    rows = F.normalize(weight[weight.norm(dim=1) > 0], dim=1)
    if len(rows) < 2:
        return torch.zeros(1, dtype=torch.bool)
    rng = generator(0, "inspection", "rows")
    along = rows @ torch.randn(rows.shape[1], generator=rng).to(rows)
    rows = rows[along.abs().argsort()]
    same = (rows[1:] * rows[:-1]).sum(dim=1).abs() > PARALLEL
    return F.pad(same, (1, 0)) | F.pad(same, (0, 1))
