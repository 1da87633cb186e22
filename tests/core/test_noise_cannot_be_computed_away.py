"""Noise that stays: an adversary who knows 8,192 entries of a gradient cannot compute the noise on the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradveil
from attacks_on_noise import (
    Words,
    generator_at,
    known_bits,
    known_bits_of_lengths,
    predicted_noise,
    recovered_state,
    stream_positions,
)
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Params
from gradveil.defenses import DEFENSES, Step
from steps import step_of

SIGMA = 0.1
LAYER = "1.weight"
BLACK = torch.zeros(32, 32, dtype=torch.bool)
BLACK[[0, 1, -2, -1]] = True
"""Two rows at the top and at the bottom of each image are black: 128 columns of the first layer get no gradient."""
SHOWN = BLACK.flatten().expand(64, 1024).flatten().numpy()
"""The 8,192 entries of the first layer that show nothing but noise."""
STATE = np.random.default_rng(0).integers(2**32, size=624, dtype=np.uint32)
"""A state of the Mersenne Twister in which every bit is random."""


@pytest.fixture(scope="module")
def exchange() -> tuple[Params, Step]:
    """The gradient of a perceptron, and the step that it comes from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 64), nn.Tanh(), nn.Linear(64, 10))
        images = torch.rand(4, 1, 32, 32).masked_fill(BLACK, 0.0)
    gradient, step = step_of(model, Batch(images, torch.arange(4)))
    assert SHOWN.sum() == 8192
    assert not gradient[LAYER].flatten()[SHOWN].any()
    return gradient, step


def noise_of_torch(update: Params, sigma: float) -> Params | None:
    """The noise of an update as an adversary computes it who takes it for ``sigma * torch.randn``."""
    values, masks = known_bits(update[LAYER].double().flatten().numpy()[SHOWN].reshape(-1, 16) / sigma)
    state = recovered_state(stream_positions(SHOWN.size)[SHOWN], values.flatten(), masks.flatten())
    if state is None:
        return None
    normals = predicted_noise(state, [tensor.shape for tensor in update.values()])
    return {name: sigma * normal for name, normal in zip(update, normals, strict=True)}


class Twisted(Stream):
    """A stream of Gradveil in all but the generator: its words are two outputs each of a Mersenne Twister."""

    def __init__(self, state: Words) -> None:
        super().__init__()
        self.rng = generator_at(state)

    def words(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=self.rng).to(device)


def noise_of_stream(update: Params, sigma: float) -> Params | None:
    """The noise of an update as an adversary computes it who knows how streams make numbers, and suspects a twister."""
    seen = update[LAYER].double().flatten().numpy() / sigma
    lengths = np.flatnonzero(SHOWN[: 2**14])  # the two of a pair lie 2 ** 14 entries, or 16 rows, apart
    values, masks = known_bits_of_lengths(seen[lengths], seen[lengths + 2**14])
    state = recovered_state(2 * lengths, values, masks)
    zero = {name: torch.zeros_like(tensor) for name, tensor in update.items()}
    return None if state is None else Twisted(state).noised(zero, sigma)


@pytest.mark.integration
def test_noise_of_torch_is_removed_from_all_entries(exchange: tuple[Params, Step]) -> None:
    """As version 0.1 drew it."""
    gradient, _ = exchange
    rng = generator_at(STATE)
    update = {name: g + SIGMA * torch.randn(g.shape, generator=rng) for name, g in gradient.items()}
    noise = noise_of_torch(update, SIGMA)
    assert noise is not None
    for name, true in gradient.items():
        assert (update[name] - noise[name] - true).abs().max() < 1e-5 * SIGMA, name


@pytest.mark.integration
def test_noise_of_a_stream_over_a_mersenne_twister_is_removed_from_all_entries(exchange: tuple[Params, Step]) -> None:
    """The rounding to a grid and the other order of numbers do not stop the attack. The cipher does, as shown below."""
    gradient, _ = exchange
    update = Twisted(STATE).noised(gradient, SIGMA)
    noise = noise_of_stream(update, SIGMA)
    assert noise is not None
    for name, true in gradient.items():
        assert (update[name] - noise[name] - true).abs().max() < 1.01 * 2**-16 * SIGMA, name


@pytest.mark.integration
@pytest.mark.parametrize(
    ("defense", "adversary"), [("noise", noise_of_torch), ("noise", noise_of_stream), ("dp", noise_of_stream)]
)
def test_noise_of_a_defense_is_removed_from_no_entry(
    exchange: tuple[Params, Step], defense: str, adversary: Callable[[Params, float], Params | None]
) -> None:
    gradient, step = exchange
    if defense == "noise":
        sigma, update = SIGMA, gradveil.defend_update(gradient, defense=f"noise:sigma={SIGMA}")
    else:  # from a stream with a seed; the bound is above the norm of all gradients, so that none is clipped
        sigma, update = 1.1 * 100 / 4, DEFENSES.build("dp:sigma=1.1,bound=100").on_gradient(gradient, step)
    true = torch.cat([(update[name] - gradient[name]).flatten() for name in gradient])
    assert float(true.std()) == pytest.approx(sigma, rel=0.02)
    noise = adversary(update, sigma)
    if noise is not None:
        computed = torch.cat([noise[name].flatten() for name in gradient])
        assert abs(float(torch.corrcoef(torch.stack([computed, true]))[0, 1])) < 5 / len(true) ** 0.5
