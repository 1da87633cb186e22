"""Public examples hold no private one, whichever examples are private and wherever else they stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import gradveil
from exchanges import SAMPLES
from gradveil import models
from gradveil.auditing import make_case
from gradveil.auditing.sources import simulated
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.defenses import DEFENSES, PublicData, censor, dcs2, graddefense
from gradveil.defenses.public import occur_in, public_images
from steps import step_on

USERS = {
    "graddefense": graddefense,
    "censor:trials=2,norms=public": censor,
    "censor:trials=2,source=public": censor,
    "dcs2:iterations=1,start=public": dcs2,
    "dcs2plus:iterations=1,start=public": dcs2,
}


def pools_of(defense: str, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[torch.Tensor, list[Batch]]:
    """The private images of an audit, and all public ones that its clients take."""
    pools: list[Batch] = []

    def recorded(*given: Any, **named: Any) -> Batch:
        pools.append(public_images(*given, **named))
        return pools[-1]

    monkeypatch.setattr(USERS[defense], "public_images", recorded)
    case = make_case({"data": "cifar10-samples", "model": "lenet", "defenses": [defense], "attacks": ["ig"], **fields})
    plan = simulated(case, SAMPLES)
    plan.cells[0].exchange()
    assert plan.private is not None
    return plan.private.batch.inputs, pools


@pytest.mark.parametrize("defense", USERS)
def test_an_audit_of_every_25th_image_has_none_of_them_in_a_public_pool(
    defense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, pools = pools_of(defense, monkeypatch, images=4, every=25)
    assert pools
    for pool in pools:
        assert len(pool) == 50
        assert not occur_in(pool.inputs, private).any()
        assert torch.equal(pool.inputs, SAMPLES.batch([*range(48, 50), *range(51, 75), *range(76, 100)]).inputs)


def test_private_images_from_the_start_leave_the_pool_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pools = pools_of("graddefense", monkeypatch, images=4)
    assert torch.equal(pools[0].inputs, SAMPLES.batch(range(50, 100)).inputs)


def test_too_few_public_images_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GradveilError, match="needs 50 public images but only 40 of cifar10-samples are not private"):
        pools_of("graddefense", monkeypatch, images=60)


@pytest.mark.parametrize("spec", USERS)
@pytest.mark.parametrize("prepared", [True, False])
def test_without_word_of_who_is_private_a_public_image_is_refused(spec: str, prepared: bool) -> None:
    gradient, step = step_on("lenet", examples=2)
    defense = DEFENSES.build(spec)
    defense = defense.for_round(step) if prepared else defense
    late = replace(step, batch=SAMPLES.batch([3, 77]))
    defense.on_gradient(gradient, step)
    with pytest.raises(GradveilError, match="the client trains on an image that is among its public ones"):
        defense.on_gradient(gradient, late)


def test_a_guarded_loop_is_refused_at_the_step_that_holds_a_public_image() -> None:
    module = models.build("lenet", SAMPLES.domain, seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    guard = gradveil.protect(module, optimizer, F.cross_entropy, defense="graddefense")
    for places, fine in (([0, 1], True), ([2, 98], False)):
        batch = SAMPLES.batch(places)
        optimizer.zero_grad()
        guard.loss(module(batch.inputs), batch.labels).backward()
        if fine:
            optimizer.step()
        else:
            with pytest.raises(GradveilError, match="write graddefense:public=DATA"):
                optimizer.step()


def test_the_same_picture_is_private_in_any_place_and_precision() -> None:
    rounded = (SAMPLES.batch([60, 90]).inputs.double() + 1e-4).clamp(0, 1)
    found = PublicData(rounded).last(SAMPLES, 45)
    kept = [place for place in range(53, 100) if place not in (60, 90)]
    assert torch.equal(found.inputs, SAMPLES.batch(kept).inputs)
    assert torch.equal(found.labels, SAMPLES.labels[kept])
    twice = SAMPLES.subset([*range(10), 3, 3, 4])
    assert len(PublicData(SAMPLES.batch([3]).inputs).last(twice, 100)) == 10
    other_shape = PublicData(torch.zeros(1, 1, 28, 28))
    assert torch.equal(other_shape.last(SAMPLES, 2).inputs, SAMPLES.batch([98, 99]).inputs)


def test_a_long_set_is_read_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.defenses.public.AT_ONCE", 7)
    found = PublicData(SAMPLES.batch(range(90, 97)).inputs).last(SAMPLES, 12)
    assert torch.equal(found.inputs, SAMPLES.batch([*range(81, 90), 97, 98, 99]).inputs)


def test_images_that_differ_by_a_level_are_two() -> None:
    images = SAMPLES.batch([0, 1]).inputs
    assert occur_in(images, images).all()
    moved = images.clone()
    moved[0, 2, 31, 31] += 1 / 255
    assert occur_in(moved, images).tolist() == [False, True]
