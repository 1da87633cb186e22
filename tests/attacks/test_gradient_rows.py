"""How products of gradients change with the inputs, row by row, and where rectifiers switch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exchanges import SAMPLES
from gradveil import models
from gradveil.attacks.parts.gradient_rows import SlopedSwitches, gradient_rows
from gradveil.attacks.parts.open_switches import with_open_switches
from gradveil.core.types import Params, cross_entropy
from gradveil.engine.network import LayerPass, SharedNetwork, gradients
from gradveil.models.resnet import BasicBlock

BATCH = SAMPLES.batch([3, 13])
LABELS = BATCH.labels[:, None]


class Narrow(nn.Module):
    """The parts of a ResNet, with few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 8, 2), BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.blocks(F.relu(self.norm(self.conv(x)))).mean(dim=(2, 3)))
        return scores


def narrow() -> Narrow:
    torch.manual_seed(0)
    return Narrow().double().eval()


def own(module: nn.Module) -> Params:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def shared(module: nn.Module) -> SharedNetwork:
    return SharedNetwork(module, own(module), train_mode=False)


def passed(network: SharedNetwork, inputs: Tensor, widths: float | None = None) -> LayerPass:
    if widths is None:
        return network.differentiate(cross_entropy, inputs, LABELS)
    with SlopedSwitches(inputs.new_full((len(inputs),), widths)):
        return network.differentiate(cross_entropy, inputs, LABELS, again=True)


def products(network: SharedNetwork, inputs: Tensor, directions: Params) -> Tensor:
    """[N, rows]: by parameter, the products of the gradient with its directions [K, N, ...]."""
    found = gradients(passed(network, inputs.clone().requires_grad_()))
    return torch.cat([(found[name] * rows).flatten(2).sum(2).T for name, rows in directions.items()], dim=1).detach()


def drawn(module: nn.Module) -> Params:
    rng = torch.Generator().manual_seed(1)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    return {name: torch.randn((2, 2, *shape), generator=rng, dtype=torch.float64) for name, shape in shapes.items()}


def predicted(network: SharedNetwork, inputs: Tensor, directions: Params, along: Tensor, widths: float) -> Tensor:
    inputs = inputs.clone().requires_grad_()
    once = passed(network, inputs, widths)
    own = [{short: directions[name] for short, name in call.parameters.items()} for call in once.calls]
    names = [name for call in once.calls for name in call.parameters.values()]
    rows = gradient_rows(once, own, inputs, at_once=7)
    by_name = dict(zip(names, (rows.flatten(2) @ along.flatten()).split(2, dim=1), strict=True))
    return torch.cat([by_name[name] for name in directions], dim=1).detach()


def moved(network: SharedNetwork, inputs: Tensor, directions: Params, along: Tensor, step: float) -> Tensor:
    ahead, behind = (products(network, inputs + sign * step * along, directions) for sign in (1, -1))
    return (ahead - behind) / (2 * step)


def pictures() -> tuple[Tensor, Tensor]:
    """Inputs [N, 1, ...] and a smooth direction [1, ...] to move them along."""
    rng = torch.Generator().manual_seed(2)
    noise = F.avg_pool2d(torch.randn((1, 3, 32, 32), generator=rng, dtype=torch.float64), 5, 1, 2)
    return BATCH.inputs.double()[:, None], noise / noise.std() * 0.2


def agreement(found: Tensor, expected: Tensor) -> float:
    return float(F.cosine_similarity(found.flatten(), expected.flatten(), dim=0))


def test_rows_are_the_derivative_where_nothing_switches() -> None:
    module = narrow()
    network, directions, (inputs, along) = shared(module), drawn(module), pictures()
    found = predicted(network, inputs, directions, along, widths=0)
    assert torch.allclose(found, moved(network, inputs, directions, along, 1e-8), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", [0.02, 0.05, 0.2])
def test_a_step_that_switches_units_is_foreseen_by_slopes_and_not_by_the_derivative(step: float) -> None:
    module = narrow()
    network, directions, (inputs, along) = shared(module), drawn(module), pictures()
    secant = moved(network, inputs, directions, along, step)
    assert agreement(predicted(network, inputs, directions, along, widths=step), secant) > 0.4
    assert agreement(predicted(network, inputs, directions, along, widths=0), secant) < 0.2


def test_slopes_change_neither_outputs_nor_gradients() -> None:
    module, (inputs, _) = narrow(), pictures()
    network = shared(module)
    plain, sloped = (passed(network, inputs.clone().requires_grad_(), widths) for widths in (None, 0.3))
    assert torch.equal(plain.outputs, sloped.outputs)
    for name, tensor in gradients(plain).items():
        assert torch.equal(gradients(sloped)[name], tensor)


def test_an_opened_network_does_not_switch_and_keeps_its_weights() -> None:
    module = models.build("resnet18", SAMPLES.domain, seed=0).eval()
    sent = own(module)
    lifted = with_open_switches(module, sent, SAMPLES.domain)
    assert {name for name in sent if not torch.equal(sent[name], lifted[name])} == {
        name for name in sent if name.endswith("bias") and "fc" not in name
    }
    closed = list[float]()

    def note(_layer: nn.Module, _inputs: object, outputs: Tensor) -> None:
        closed.append(float((outputs < 0).float().mean()))

    for name, layer in module.named_modules():
        if name.endswith("bn1"):
            layer.register_forward_hook(note)
    with torch.no_grad():
        torch.func.functional_call(module, dict(lifted), (SAMPLES.batch(range(4)).inputs,))
    assert len(closed) == 9
    assert max(closed) < 0.05
