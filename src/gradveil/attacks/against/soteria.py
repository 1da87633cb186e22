"""Against Soteria, which sets entries of one layer's gradient to zero and sends the rest as it is."""

from __future__ import annotations

from gradveil.attacks.parts.channel import Channel
from gradveil.attacks.parts.counter import against
from gradveil.defenses.soteria import Soteria
from gradveil.models import classifier
from gradveil.threat.observation import Observation


@against(
    "soteria",
    sentence="It leaves the layer that Soteria prunes out of the matching; the rest was sent as it is.",
    after_steps=True,
)
def channel(defense: Soteria, one: Observation) -> Channel:
    layer = classifier(one.module, one.domain) if defense.layer == "classifier" else defense.layer
    return Channel(zeroed=frozenset({f"{layer}.weight"}))
