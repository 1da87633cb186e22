"""Trap weights: most of a batch's images come back exactly off a crafted first layer."""

from __future__ import annotations

import pytest
import torch

from exchanges import SAMPLES, observed, private_batches
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.active.trap import most_credible, trap_rows
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.types import Batch
from gradveil.metrics import matching_order
from interrogation import interrogated

ANY = Budget(1, 1)


def exactly_recovered(found: torch.Tensor, batch: Batch) -> int:
    """Private images whose matched reconstruction has a PSNR above 60 dB."""
    order = matching_order(Batch(found, batch.labels), batch)
    return int(((found[order] - batch.inputs).square().flatten(1).mean(dim=1) < 1e-6).sum())


@pytest.mark.parametrize("model", ["mlp", "mlp:normalize=true"])
def test_a_fifth_of_a_batch_of_32_comes_back_exactly(model: str) -> None:
    attack = ATTACKS.build("trap", ANY)
    for batch in private_batches(3, 32):
        seen = interrogated(attack, batch, model=model)
        (found,) = attack([seen], seeds=[0])
        assert seen.crafted == ("body.0.weight", "body.0.bias")
        assert seen.earlier == ()
        assert found.inputs.shape == batch.inputs.shape
        assert exactly_recovered(found.inputs, batch) >= 12  # measured: 19, 18 and 13


def test_the_trap_reads_more_than_the_honest_layer_gives_away() -> None:
    """Some rows of an untrained layer see one example alone anyway; crafted ones do so by design."""
    attack, batches = ATTACKS.build("trap", ANY), private_batches(3, 32)
    honest = attack(observed(batches, model="mlp"), seeds=[0, 1, 2])
    trapped = attack([interrogated(attack, batch, model="mlp") for batch in batches], seeds=[0, 1, 2])
    counts = [
        sum(exactly_recovered(one.inputs, batch) for one, batch in zip(found, batches, strict=True))
        for found in (honest, trapped)
    ]
    assert counts[0] + 10 < counts[1]


def test_few_examples_set_a_row_off_and_fewer_at_a_smaller_scale() -> None:
    pixels = private_batches(1, 32)[0].inputs.flatten(1)
    shares = []
    for scale in (0.9, 0.95, 1.0):
        rows = trap_rows((256, pixels.shape[1]), scale, 0.5, generator(0, "trap"))
        assert torch.equal((rows < 0).sum(dim=1), torch.full((256,), pixels.shape[1] // 2))
        shares.append(float((pixels @ rows.T > 0).float().mean()))
    assert shares[0] < 0.005 < shares[1] < 0.1 < 0.4 < shares[2]


def test_credible_readouts_are_different_ones_that_rows_agree_on() -> None:
    sure, contrasty, flat = SAMPLES.batch([0, 1, 2]).inputs.split(1)
    flat = 0.5 + 0.1 * (flat - 0.5)
    wild, idle = 3 * sure, torch.full_like(sure, torch.nan)
    read = torch.cat([flat, wild, sure, idle, contrasty, sure + 1e-5])
    found = most_credible(read, 4)
    assert len(found) == 3, "out of range, idle and repeated ones are left out"
    for image, expected in zip(found.split(1), (sure, contrasty, flat), strict=True):
        torch.testing.assert_close(image, expected, atol=1e-4, rtol=0)
    assert torch.equal(most_credible(read, 1), sure)


def test_what_is_not_read_is_gray() -> None:
    (batch,) = private_batches(1, 32)
    attack = ATTACKS.build("trap:scale=0.5", ANY)  # no example sets a row off
    (found,) = attack([interrogated(attack, batch, model="mlp")], seeds=[0])
    assert torch.equal(found.inputs, torch.full_like(batch.inputs, 0.5))
    assert found.stopped == "stuck"


def test_the_seed_draws_the_rows() -> None:
    (batch,) = private_batches(1, 4)
    attack = ATTACKS.build("trap", ANY)
    first, again, other = (interrogated(attack, batch, model="mlp", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.sent["body.0.weight"], again.sent["body.0.weight"])
    assert not torch.equal(first.sent["body.0.weight"], other.sent["body.0.weight"])


def test_it_says_what_it_cannot_do() -> None:
    (batch,) = private_batches(1, 2)
    with pytest.raises(GradveilError, match="'trap' reads a fully connected first layer"):
        interrogated(ATTACKS.build("trap", ANY), batch, model="lenet")
    for bad in ("trap:scale=1.5", "trap:sigma=0"):
        with pytest.raises(GradveilError, match="scale lies between"):
            ATTACKS.build(bad, ANY)
