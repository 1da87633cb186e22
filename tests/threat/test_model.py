from __future__ import annotations

import pytest

from exchanges import observed, private_batches
from gradveil.core.errors import GradveilError
from gradveil.core.types import Recipe
from gradveil.threat import THREATS, Knowledge, observe, threat_model


def test_the_eight_models_grow_as_in_the_sok() -> None:
    knows = {name: threat.knows for name, threat in THREATS.items()}
    assert list(knows) == list("ABCDEFGH")
    assert knows["A"] < knows["B"] < knows["C"] < knows["D"] < knows["E"]
    assert knows["C"] < knows["F"] < knows["G"] < knows["H"]
    assert Knowledge.CRAFT not in knows["E"]
    assert not any(Knowledge.LABELS in known for known in knows.values())


def test_extra_knowledge_is_named() -> None:
    threat = threat_model("b+labels")
    assert threat.name == "B+labels"
    assert threat.knows == THREATS["B"].knows | {Knowledge.LABELS}
    assert any("real systems do not reveal" in sentence for sentence in threat.sentences())


@pytest.mark.parametrize("spec", ["Z", "", "C+everything"])
def test_an_unknown_threat_is_refused(spec: str) -> None:
    with pytest.raises(GradveilError, match="there are"):
        threat_model(spec)


def test_an_attack_that_needs_more_is_refused_with_the_models_it_fits() -> None:
    with pytest.raises(GradveilError, match=r"needs batch-size, which threat A lacks; it fits threat model B, C"):
        THREATS["A"].vet("ig", {Knowledge.BATCH_SIZE})


@pytest.mark.parametrize("threat", list(THREATS))
def test_an_observation_holds_what_the_adversary_knows_and_no_more(threat: str) -> None:
    (seen,) = observed(private_batches(1), threat=threat)
    knows = THREATS[threat].knows
    assert (seen.batch_size is not None) == (Knowledge.BATCH_SIZE in knows)
    assert (seen.recipe is not None) == (Knowledge.RECIPE in knows)
    assert (seen.defense is not None) == (Knowledge.DEFENSE in knows)
    assert seen.labels is None


@pytest.mark.parametrize(("threat", "size"), [("A", None), ("C", 3), ("E+labels", 3)])
def test_without_the_examples_there_is_their_number_at_most(threat: str, size: int | None) -> None:
    """Who taps a line does not see them."""
    (known,) = observed(private_batches(1))
    seen = observe(
        module=known.module, model=known.model, domain=known.domain, sent=known.sent, reply=known.reply, batch_size=3,
        recipe=Recipe(), defense="none", threat=threat_model(threat),
    )  # fmt: skip
    assert (seen.batch_size, seen.labels, seen.statistics) == (size, None, None)
