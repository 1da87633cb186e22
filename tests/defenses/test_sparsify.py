from __future__ import annotations

import doctest

import pytest
import torch

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.defenses import DEFENSES, Log, sparsify
from steps import step_on


@pytest.mark.parametrize("rate", [0.5, 0.9, 0.99])
def test_exactly_the_largest_entries_of_each_tensor_are_sent(rate: float) -> None:
    gradient, step = step_on("lenet:init=wide")
    sent = DEFENSES.build(f"sparsify:rate={rate}").on_gradient(gradient, step)
    for name, g in gradient.items():
        kept = max(1, round((1 - rate) * g.numel()))
        order = g.flatten().abs().argsort(descending=True)
        expected = torch.zeros(g.numel())
        expected[order[:kept]] = g.flatten()[order[:kept]]
        assert torch.equal(sent[name], expected.view_as(g)), name
    zeros = sum(int((g == 0).sum()) for g in sent.values()) / sum(g.numel() for g in sent.values())
    assert step.log.means()["zeros"] == pytest.approx(zeros)
    assert zeros == pytest.approx(rate, abs=0.005)


def test_of_equal_entries_only_as_many_are_kept_as_the_rate_allows() -> None:
    sent = DEFENSES.build("sparsify:rate=0.75").on_gradient({"w": torch.ones(2, 4)}, step_on(examples=1)[1])
    assert torch.equal(sent["w"], torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_precision_is_kept(dtype: torch.dtype) -> None:
    tensor = torch.randn(50, generator=generator(0)).to(dtype)
    sent = sparsify.kept_largest({"w": tensor}, 1 - 5 / tensor.numel())["w"]
    assert sent.dtype == dtype
    assert set(sent[sent != 0].tolist()) == set(tensor[tensor.abs().argsort(descending=True)[:5]].tolist())


def test_the_update_is_pruned_once() -> None:
    update, log = {"w": torch.tensor([0.1, -2.0, 1.0, 0.0])}, Log()
    defense = DEFENSES.build("sparsify:rate=0.5,at=update")
    assert defense.on_gradient(update, step_on(examples=1)[1]) is update
    assert torch.equal(defense.on_update(update, Stream.seeded(0), log)["w"], torch.tensor([0.0, -2.0, 1.0, 0.0]))
    assert log.means() == {"zeros": 0.5}


def test_the_rule_for_small_tensors_is_as_documented() -> None:
    assert doctest.testmod(sparsify).failed == 0
    everything = DEFENSES.build("sparsify:rate=0").on_gradient({"w": torch.arange(3.0)}, step_on(examples=1)[1])
    assert torch.equal(everything["w"], torch.arange(3.0))


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_outside_is_refused(rate: float) -> None:
    with pytest.raises(GradveilError, match="rate is from 0 to below 1"):
        DEFENSES.build(f"sparsify:rate={rate}")
