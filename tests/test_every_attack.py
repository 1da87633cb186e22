"""One table over every registered attack and the models it supports: it runs, is deterministic and never gets worse."""

from __future__ import annotations

import pytest
import torch

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, Budget

MODELS = ["lenet:init=wide", "convnet:width=4", "mlp", "vit:depth=1,dim=24"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", list(ATTACKS))
def test_attack(name: str, model: str, size: int) -> None:
    attack = ATTACKS.build(name, Budget(2, 10))
    seen = observed(private_batches(2, size), model=model)
    first, second = (attack(seen, seeds=[3, 4]) for _ in range(2))
    for one, again in zip(first, second, strict=True):
        assert torch.equal(one.inputs, again.inputs), "the same seeds give the same pictures"
        assert one.objective == again.objective == min(one.objectives)
        assert one.inputs.shape == (size, 3, 32, 32)
        assert one.objective <= one.trace[0]
        assert one.strategy


@pytest.mark.parametrize("name", list(ATTACKS))
def test_a_seed_means_the_same_alone_and_in_company(name: str) -> None:
    """What an observation gets does not depend on which others are attacked beside it, up to rounding of one step."""
    attack = ATTACKS.build(f"{name}:strategy=loop,iterations=1,restarts=2", Budget(1, 1))
    seen = observed(private_batches(3))
    together = attack(seen, seeds=[7, 8, 9])
    (alone,) = attack(seen[2:], seeds=[9])
    torch.testing.assert_close(together[2].inputs, alone.inputs)


@pytest.mark.parametrize("name", list(ATTACKS))
def test_the_prior_alone_does_not_use_the_update(name: str) -> None:
    alone = ATTACKS.build(name, Budget(1, 5)).prior_only()
    if alone is None:
        pytest.skip(f"{name} has no search to run without the update")
    batches = private_batches(2)
    (one,) = alone(observed(batches[:1]), seeds=[1])
    (other,) = alone(observed(batches[1:]), seeds=[1])
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.labels, other.labels)
