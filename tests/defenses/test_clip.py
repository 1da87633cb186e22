from __future__ import annotations

import pytest
import torch

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.trees import norm, scaled
from gradveil.core.types import Params, Recipe
from gradveil.defenses import DEFENSES, Log, clip
from steps import SAMPLES, step_on


def test_tensors_above_the_bound_get_its_norm_and_the_others_stay() -> None:
    gradient, step = step_on("lenet:init=wide")
    lengths = {name: float(g.norm()) for name, g in gradient.items()}
    ordered = sorted(lengths.values())
    bound = (ordered[4] + ordered[5]) / 2  # no tensor lies exactly at it
    sent = DEFENSES.build(f"clip:bound={bound}").on_gradient(gradient, step)
    above = [name for name in gradient if lengths[name] > bound]
    assert 0 < len(above) < len(gradient)
    for name, g in gradient.items():
        if name in above:
            assert torch.allclose(sent[name], g * bound / lengths[name])
            assert float(sent[name].norm()) == pytest.approx(bound, rel=1e-5)
        else:
            assert torch.equal(sent[name], g)
    assert step.log.means() == {"clipped": len(above) / len(gradient)}


def test_global_clipping_keeps_the_direction_of_the_whole() -> None:
    gradient, step = step_on("lenet:init=wide")
    length = float(norm(gradient))
    sent = DEFENSES.build(f"clip:bound={length / 5},per=global").on_gradient(gradient, step)
    for name, expected in scaled(gradient, 0.2).items():
        assert torch.allclose(sent[name], expected, rtol=1e-5)
    same = DEFENSES.build(f"clip:bound={2 * length},per=global").on_gradient(gradient, step)
    assert all(torch.equal(same[name], g) for name, g in gradient.items())
    assert step.log.values("clipped") == (1.0, 0.0)


def test_examples_are_clipped_as_in_a_plain_loop() -> None:
    _, step = step_on("convnet:width=8", examples=5)
    singles = [step.gradient(step.batch.take(slice(i, i + 1))) for i in range(5)]
    lengths = [float(norm(g)) for g in singles]
    bound = sum(lengths) / 5
    expected: Params = {
        name: sum(g[name] * min(1.0, bound / length) for g, length in zip(singles, lengths, strict=True)) / 5
        for name in step.params
    }
    sent = DEFENSES.build(f"clip:bound={bound},per=example").on_gradient(step.gradient(), step)
    for name in expected:
        assert torch.allclose(sent[name], expected[name], rtol=1e-4, atol=1e-7)
    assert step.log.means() == {"clipped": sum(length > bound for length in lengths) / 5}


def test_examples_in_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = step_on("lenet:init=wide", examples=5)
    at_once = DEFENSES.build("clip:bound=1,per=example").on_gradient(step.gradient(), step)
    monkeypatch.setattr(clip, "ENTRIES_AT_ONCE", 2 * sum(p.numel() for p in step.params.values()))
    sizes = [len(each["fc.bias"]) for each in clip._in_chunks(step)]
    assert sizes == [2, 2, 1]
    in_chunks = DEFENSES.build("clip:bound=1,per=example").on_gradient(step.gradient(), step)
    for name, g in at_once.items():
        assert torch.allclose(in_chunks[name], g, rtol=1e-4, atol=1e-7)


def test_a_gradient_of_zeros_stays_zero() -> None:
    zero = {"w": torch.zeros(3)}
    for spec in ("clip", "clip:per=global"):
        sent = DEFENSES.build(spec).on_gradient(zero, step_on(examples=1)[1])
        assert torch.equal(sent["w"], zero["w"])


def test_the_update_is_clipped_once() -> None:
    update, log = {"w": torch.tensor([3.0, 4.0])}, Log()
    defense = DEFENSES.build("clip:bound=1,at=update")
    assert defense.on_gradient(update, step_on(examples=1)[1]) is update
    assert torch.allclose(defense.on_update(update, generator(0), log)["w"], torch.tensor([0.6, 0.8]))
    assert log.means() == {"clipped": 1.0}


def test_batch_norm_in_train_mode_has_no_gradients_of_single_examples() -> None:
    model = step_on("convnet:width=8", examples=2)[1].model.module
    client = Client(model, recipe=Recipe(train_mode=True), defense=DEFENSES.build("clip:per=example"))
    with pytest.raises(GradveilError, match=r"'body\.bn0' is batch norm in train mode"):
        client.reply(client.model.params, SAMPLES.batch(range(2)), generator(0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [("clip:bound=0", "bound is above 0, not 0"), ("clip:per=example,at=update", "per=example needs at=step")],
)
def test_impossible_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        DEFENSES.build(spec)
