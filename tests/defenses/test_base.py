"""Which defenses may follow which."""

from __future__ import annotations

import pytest

from gradveil.core.errors import GradveilError
from gradveil.defenses import DEFENSES, Chain


@pytest.mark.parametrize(
    "spec", ["noise+clip:per=example", "sparsify+dp", "censor+clip:per=example", "noise+graddefense:bound=1"]
)
def test_a_link_that_recomputes_the_gradient_comes_first(spec: str) -> None:
    with pytest.raises(GradveilError, match="would be lost: put it first"):
        DEFENSES.build(spec)


@pytest.mark.parametrize("later", ["clip:per=example", "soteria", "censor", "outpost", "dcs2", "graddefense"])
def test_nothing_after_a_guarantee_looks_at_the_examples_again(later: str) -> None:
    with pytest.raises(GradveilError, match=r"would (be lost|not hold)"):
        DEFENSES.build(f"dp+{later}")


@pytest.mark.parametrize(
    "spec",
    [
        "dp+sparsify",
        "dp+noise+clip",
        "ats+dp",
        "clip:per=example+noise",
        "noise:at=update+dp",
        "soteria+noise",
        "dp+ats",
    ],
)
def test_what_needs_no_examples_may_stand_anywhere(spec: str) -> None:
    chain = DEFENSES.build(spec)
    assert isinstance(chain, Chain)
    assert len(chain.links) == len(spec.split("+"))
