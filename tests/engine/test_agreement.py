"""Layer rules are compared with backward before they are used: right ones pass on a kink too, wrong ones nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from exchanges import SAMPLES, observed, private_batches
from gradveil import engine
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.core.trees import detached, norm, subtract
from gradveil.core.types import Batch, Params
from gradveil.engine.agreement import SAME, random_inputs
from gradveil.threat import Observation
from steps import step_of

ROUNDED = 1e-6
AT_ZERO = 40


class OnAKink(nn.Module):
    """Units that some inputs [2, C, H, W] put at zero, and whose last digits depend on the size of the batch.

    Kernels of some processors round by the size of a batch. Here all do, so that one example alone and the same among
    others always lie on different sides of the kink. ``around`` uses weights a second time, where no rule sees it.
    """

    def __init__(self, tried: Tensor, *, around: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.around = nn.Linear(3072, 400), nn.Linear(400, 10), around
        with torch.no_grad():
            for number, example in enumerate(tried):
                units = slice(number * AT_ZERO, (number + 1) * AT_ZERO)
                self.first.bias[units] -= self._units(example[None])[0, units]

    def _units(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        units: Tensor = self.first(flat)
        return units + flat.flip(1) @ self.first.weight.T if self.around else units

    def forward(self, x: Tensor) -> Tensor:
        rounding = -ROUNDED if len(x) == 1 else ROUNDED
        outputs: Tensor = self.last((self._units(x) + rounding).relu())
        return outputs


def by_rules(module: nn.Module, batch: Batch) -> Params:
    params = detached(dict(module.named_parameters()))
    network = engine.SharedNetwork(module, params, train_mode=False)
    inputs = batch.inputs.unsqueeze(1).requires_grad_()
    return detached(engine.gradients(network.differentiate(nn.functional.cross_entropy, inputs, batch.labels[:, None])))


def seen_by(module: nn.Module) -> list[Observation]:
    sent = detached(dict(module.named_parameters()))
    reply = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) for name, p in sent.items()}
    return [replace(one, module=module, sent=sent, reply=reply) for one in observed(private_batches(2), model="lenet")]


def test_rules_and_backward_differ_on_a_kink_though_both_are_right() -> None:
    """Else the tests below show nothing."""
    drawn = random_inputs((3, 32, 32))
    module = OnAKink(drawn)
    for inputs, same in ((drawn, False), (SAMPLES.batch(range(2)).inputs, True)):
        _, step = step_of(module, Batch(inputs, torch.tensor([0, 0])))
        found, expected = by_rules(module, step.batch), step.example_gradients()
        assert engine.same_tensors(found, expected) is same
        assert bool(norm(subtract(found, expected)) > 0.05 * norm(expected)) is not same


@pytest.mark.parametrize("around", [False, True])
def test_a_defense_trusts_right_rules_on_a_kink_and_no_wrong_ones(around: bool) -> None:
    _, step = step_of(OnAKink(random_inputs((3, 32, 32)), around=around), SAMPLES.batch(range(2)))
    passed = engine.example_pass(step, step.batch)
    assert (passed is not None) is not around
    assert passed is None or isinstance(passed.network, engine.SeparateNetwork)
    assert ("rules do not give" in engine.why_not_shared(step)) is around


@pytest.mark.parametrize("around", [False, True])
def test_identification_trusts_right_rules_on_a_kink_and_no_wrong_ones(around: bool) -> None:
    (one, _) = seen_by(OnAKink(random_inputs((3, 32, 32)), around=around))
    found = engine.shared_gradients(one.module, one.sent, one.loss, train_mode=False, shape=(3, 32, 32), classes=10)
    assert (found is not None) is not around


@pytest.mark.parametrize("around", [False, True])
def test_a_search_trusts_right_rules_on_a_kink_and_no_wrong_ones(around: bool) -> None:
    attack = ATTACKS.build("ig:tv=0", Budget(1, 1))
    assert isinstance(attack, Matching)
    seen = observed(private_batches(2), model="lenet")
    _, starts, _ = attack.problems(seen, [0, 1])
    inputs = attack.phases[0].prior(seen[0], None).decode(starts, {}).flatten(0, 1)
    found, again, given = attack.problems(seen_by(OnAKink(inputs, around=around)), [0, 1])
    assert torch.equal(again["pixels"], starts["pixels"])
    assert ("joint" in found) is not around
    if not around:
        (gradients, _), (expected, _) = found["joint"](starts, given), found["loop reverse"](starts, given)
        away = (gradients["pixels"] - expected["pixels"]).norm()
        assert away > 2 * SAME * expected["pixels"].norm(), "the starts do lie on a kink"


def test_a_difference_at_every_point_is_a_difference() -> None:
    tried: list[Tensor] = []

    def never(point: Params) -> bool:
        tried.append(point["x"])
        return False

    assert not engine.agree(never, {"x": torch.zeros(2, 3)})
    assert len(tried) == 3
    assert all(0 < point.abs().max() < 0.1 for point in tried[1:])
    assert engine.agree(lambda point: bool(point["x"].any()), {"x": torch.zeros(2, 3)})


@pytest.mark.parametrize(("factor", "same"), [(1.001, True), (1.1, False)])
def test_every_tensor_of_every_example_counts(factor: float, same: bool) -> None:
    expected = {"large": torch.full((2, 9), 100.0), "small": torch.ones(2, 3), "rounding": torch.full((2, 3), 1e-5)}
    found = {name: tensor.clone() for name, tensor in expected.items()}
    found["small"][1] *= factor
    found["rounding"] *= -1
    assert engine.same_tensors(found, expected) is same
    assert not engine.same_tensors({"large": expected["large"]}, expected)
