"""Biases that sort the examples: a ladder in front (Imprint), or one in the classifier that decides alone (Fishing)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradveil.client.inspection.broadcast import Broadcast
from gradveil.client.inspection.findings import Finding

ORDERED = 0.9
FEWEST_STEPS = 15
"""Fewer biases may be in order by chance: of 16, once in ten billion."""
DECISIVE = 30.0
"""Scores this far apart make a probability of 1e-13, whatever the example shows."""


def bias_ladder(broadcast: Broadcast) -> Iterator[Finding]:
    for layer in broadcast.hidden:
        if layer.bias is None or layer.rows <= FEWEST_STEPS:
            continue
        ordered = _ordered(layer.bias / layer.weight.norm(dim=1).clamp(min=1e-30))
        if ordered > ORDERED:
            yield Finding(
                check="bias ladder",
                where=(f"{layer.name}.bias",),
                sentence=f"{ordered:.0%} of its {layer.rows} biases, each over the size of its row, come in order "
                "(by chance: half), as quantiles do that sort examples into bins",
                figure=ordered,
                bound=ORDERED,
            )


def _ordered(values: Tensor) -> float:
    """The share of steps from one value to the next that go the same way, equal ones going neither."""
    steps = values.diff().sign()
    return max(float((steps == way).float().mean()) for way in (1, -1))


def decisive_bias(broadcast: Broadcast) -> Iterator[Finding]:
    layer = broadcast.classifier
    if layer is None or layer.bias is None:
        return
    apart = float(layer.bias.max() - layer.bias.min())
    if apart > DECISIVE:
        yield Finding(
            check="decisive bias",
            where=(f"{layer.name}.bias",),
            sentence=f"the classifier's biases are {apart:.3g} apart (honest: a few units), so that they decide on the "
            "class whatever an example shows, and only chosen examples have a gradient",
            figure=apart,
            bound=DECISIVE,
        )
