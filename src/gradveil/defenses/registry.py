"""Defenses by name, and chains of them: ``clip:bound=4+noise:sigma=0.1`` clips, then adds noise."""

from __future__ import annotations

import re
from typing import Any

from gradveil.core.registry import Registry
from gradveil.defenses.base import Defense
from gradveil.defenses.chain import Chain

_LINK = re.compile(r"\s*\+\s*(?=[a-z])")
"""A plus before a name: the one in 1e+3 stands before a digit."""


class DefenseRegistry(Registry[Defense]):
    """A registry whose specs may be chains."""

    def build(self, spec: str, *context: Any) -> Defense:
        parts = [super(DefenseRegistry, self).build(part, *context) for part in _LINK.split(spec)]
        return parts[0] if len(parts) == 1 else Chain(parts)

    def canonical(self, spec: str) -> str:
        return "+".join(super(DefenseRegistry, self).canonical(part) for part in _LINK.split(spec))

    def reshaping(self, spec: str) -> str | None:
        """Those links of a chain that change the architecture: what both sides must know to build the model."""
        links = [part for part in _LINK.split(spec) if super(DefenseRegistry, self).build(part).reshapes]
        return "+".join(super(DefenseRegistry, self).canonical(part) for part in links) or None


DEFENSES = DefenseRegistry("defense")


@DEFENSES.register("none")
def none() -> Defense:
    """No defense: the update leaves as it is."""
    return Defense()
