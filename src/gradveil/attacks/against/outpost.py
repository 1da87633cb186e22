"""Against OUTPOST, which sends the largest entries of each layer, with noise in proportion to the layer's risk."""

from __future__ import annotations

from gradveil.attacks.parts.channel import Channel
from gradveil.attacks.parts.counter import against
from gradveil.defenses.outpost import Outpost, layer_risks, layers
from gradveil.threat.observation import Observation


@against(
    "outpost",
    sentence="It matches only the entries that were sent, and layers by how much of them is not noise: "
    "the spread of their weights tells.",
)
def channel(defense: Outpost, one: Observation) -> Channel:
    """The broadcast shows the spread of the weights, and which entries are sent does not depend on the noise."""
    groups = layers(one.sent)
    levels = (defense.scale * layer_risks(one.sent, groups)).square().tolist()
    noise = {name: level for names, level in zip(groups, levels, strict=True) for name in names}
    return Channel(noise_by_tensor=noise, zeroed=frozenset(one.sent), largest=True)
