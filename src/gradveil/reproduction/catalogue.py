"""All reproductions by name."""

from __future__ import annotations

import difflib

from gradveil.core.errors import UnknownNameError
from gradveil.reproduction.papers import censor, dcs2, ggl, outpost
from gradveil.reproduction.table import Reproduction

REPRODUCTIONS: dict[str, Reproduction] = {
    one.name: one for one in (*censor.REPRODUCTIONS, *outpost.REPRODUCTIONS, *dcs2.REPRODUCTIONS, *ggl.REPRODUCTIONS)
}


def reproduction(name: str) -> Reproduction:
    """The reproduction of a name, or an error that names near ones."""
    if name not in REPRODUCTIONS:
        near = difflib.get_close_matches(name, REPRODUCTIONS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "gradveil reproduce --list shows all"
        raise UnknownNameError(f"no reproduction is called {name!r}; {hint}")
    return REPRODUCTIONS[name]
