"""Against CENSOR, whose updates stand at right angles to the gradient: what is left are lengths, and the right angle.

On pixels that buys nothing (docs/attacks/informed.md), so matching has no counter-move. It tells candidates apart.
"""

from __future__ import annotations

from torch import Tensor

from gradveil.attacks.parts.channel import Channel, RightAngle
from gradveil.attacks.parts.counter import against
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses.censor import Censor
from gradveil.threat.observation import Observation


@against("censor")
def channel(defense: Censor, _: Observation) -> Channel:
    left = RightAngle(
        whole=not defense.layerwise,
        spread={"preserve": 0.0, "random": defense.spread, "public": None}[defense.norms],
        released=defense.projection == "released",
        plain=defense.fallback == "original" or defense.rounds is not None,
    )
    return Channel(right_angle=left, draw=draw)


def draw(update: Params, drawn: Params) -> Params:
    """One trial: orthogonal to the update in every tensor, and of its length."""

    def orthogonal(g: Tensor, r: Tensor) -> Tensor:
        square = g.square().sum() + 1e-20
        left = r - (r * g).sum() / square * g
        return left * (square / (left.square().sum() + 1e-20)).sqrt()

    return map_each(orthogonal, update, drawn)
