"""Which defenses may follow which, how they are spelled, and what they remember."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.defenses import DCS2, DEFENSES, Chain, Defense, Noise
from gradveil.defenses.censor import Flat, LossAfter
from gradveil.engine import cached, examples
from steps import step_on

QUICK = {"dcs2": "dcs2:iterations=1", "dcs2plus": "dcs2plus:iterations=1"}


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


BUILT = [
    *DEFENSES,
    "noise:sigma=0.2,kind=laplace,at=update", "clip:per=example,bound=2", "clip:per=global,at=update", "dp:steps=3",
    "censor:layerwise=false,rounds=2", "soteria:score=released,offset=0.1", "clip:bound=1+noise:sigma=0.3",
]  # fmt: skip


@pytest.mark.parametrize("spec", BUILT)
def test_a_defense_says_how_it_is_built(spec: str) -> None:
    built = DEFENSES.build(spec)
    assert repr(DEFENSES.build(built.spec)) == repr(built)
    assert built.spec == DEFENSES.canonical(spec)


def test_the_spec_leaves_defaults_out() -> None:
    assert Noise().spec == "noise"
    assert Noise(sigma=0.1, at="update").spec == "noise:at=update"
    assert DEFENSES.build("clip:bound=4,per=example").spec == "clip:per=example"


def test_what_no_text_can_hold_has_no_spec() -> None:
    class Mine(Defense):
        pass

    class Louder(Noise):
        pass

    for nameless in (Mine(), Louder()):
        with pytest.raises(GradveilError, match="has no name to write"):
            _ = nameless.spec
    with pytest.raises(GradveilError, match="sensitive is no text or number"):
        _ = DCS2(sensitive=torch.tensor([True])).spec


@pytest.mark.parametrize("name", [name for name in DEFENSES if name != "topk"])  # it is to remember
def test_instances_hold_their_options_and_nothing_that_changes(name: str) -> None:
    gradient, step = step_on("lenet", examples=2)
    defense = DEFENSES.build(QUICK.get(name, name))
    before = dict(vars(defense))
    follows = {name for name, own in getattr(defense, "__dataclass_fields__", {}).items() if not own.init}
    assert before.keys() - follows <= DEFENSES.options(name).keys()
    if not defense.reshapes:
        defense.for_round(step).on_gradient(gradient, step)
        defense.on_gradient(gradient, step)
    assert vars(defense) == before
    if before:
        with pytest.raises(AttributeError):
            setattr(defense, next(iter(before)), None)


@pytest.mark.integration
def test_what_is_remembered_goes_with_the_model_and_stays_in_its_thread() -> None:
    for spec in ("outpost", "soteria", "graddefense:images=8", "graddefense:images=8,probes=1", "censor:trials=2"):
        gradient, step = step_on("lenet", examples=2)
        DEFENSES.build(spec).on_gradient(gradient, step)
        if spec.startswith("censor"):
            LossAfter(step, Flat(gradient), lr=0.1).replayed(Flat(gradient).gaussian(2, step.rng), start_too=True)
        model = weakref.ref(step.model.module)
        assert model() in examples._memory.by_module
        del step
        gc.collect()
        assert model() is None, spec
    module, made = nn.Linear(1, 1), []
    for _ in range(2):
        cached(module, "key", lambda: made.append(threading.get_ident()))
        other = threading.Thread(target=cached, args=(module, "key", lambda: made.append(0)))
        other.start()
        other.join()
    assert sorted(made) == [0, 0, threading.get_ident()]
