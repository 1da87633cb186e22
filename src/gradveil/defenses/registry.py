"""Defenses by name, and chains of them: ``clip:bound=4+noise:sigma=0.1`` clips, then adds noise."""

from __future__ import annotations

import re
from typing import Any

from gradveil.core.registry import Registry, split_spec
from gradveil.defenses.base import Defense
from gradveil.defenses.chain import Chain

_LINK = re.compile(r"\s*\+\s*(?=[a-z])")
"""A plus before a name: the one in 1e+3 stands before a digit."""


class DefenseRegistry(Registry[Defense]):
    """A registry whose specs may be chains."""

    def links(self, spec: str) -> list[str]:
        """The specs that a chain is made of."""
        return _LINK.split(spec.strip())

    def build(self, spec: str, *context: Any) -> Defense:
        parts = [super(DefenseRegistry, self).build(link, *context) for link in self.links(spec)]
        return parts[0] if len(parts) == 1 else Chain(parts)

    def canonical(self, spec: str) -> str:
        return "+".join(super(DefenseRegistry, self).canonical(link) for link in self.links(spec))

    def reshaping(self, spec: str) -> str | None:
        """Those links of a chain that change the architecture: what both sides must know to build the model."""
        reshape = [link for link in self.links(spec) if self.reshapes(link)]
        return "+".join(super(DefenseRegistry, self).canonical(link) for link in reshape) or None

    def reshapes(self, link: str) -> bool:
        """Whether one defense changes the architecture: known without building it."""
        return bool(getattr(self.get(split_spec(link)[0]), "reshapes", False))


DEFENSES = DefenseRegistry("defense")


@DEFENSES.register("none")
def none() -> Defense:
    """No defense: the update leaves as it is."""
    return Defense()
