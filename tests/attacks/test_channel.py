"""What an adversary estimates of a defense from an update alone, and draws of a defense that it knows."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.channel import (
    Estimated,
    clip_bound,
    cut_tensors,
    estimate,
    noise_level,
    trusts,
)
from gradveil.attacks.parts.counter import Averaged, channels_of
from gradveil.attacks.parts.objectives import Cosine
from gradveil.core.errors import GradveilError
from gradveil.core.trees import add, norm, subtract
from gradveil.core.types import Recipe
from gradveil.metrics import psnr

MODELS = ["lenet:init=wide", "resnet18", "vit:depth=1,dim=24"]


@pytest.mark.parametrize("model", MODELS)
def test_the_clip_bound_is_read_off_the_norms(model: str) -> None:
    (bare,) = observed(private_batches(1), model=model)
    norms = sorted(float(tensor.norm()) for tensor in bare.reply.values())
    (clipped,) = observed(private_batches(1), model=model, defense=f"clip:bound={norms[-3]}")
    assert clip_bound(bare.reply) is None
    assert clip_bound(clipped.reply) == pytest.approx(norms[-3], rel=1e-3)


@pytest.mark.integration
@pytest.mark.parametrize("model", MODELS)
def test_what_was_cut_is_seen(model: str) -> None:
    (bare,) = observed(private_batches(1), model=model)
    (sparse,) = observed(private_batches(1), model=model, defense="sparsify:rate=0.9")
    (pruned,) = observed(private_batches(1), model=model, defense="soteria:rate=0.8")
    large = {name for name, tensor in bare.reply.items() if tensor.numel() >= 100}
    classifier = [name for name, tensor in bare.reply.items() if tensor.dim() == 2][-1]
    assert cut_tensors(bare.reply) == set()
    assert large <= cut_tensors(sparse.reply)
    assert cut_tensors(pruned.reply) == {classifier}


def test_silent_units_are_taken_for_left_out() -> None:
    """A ReLU that the example does not drive leaves a column of the next layer at zero, as Soteria does."""
    (bare,) = observed(private_batches(1), model="mlp")
    assert cut_tensors(bare.reply)


@pytest.mark.integration
@pytest.mark.parametrize("model", ["lenet", "resnet18", "mlp"])
def test_the_noise_level_is_read_off_the_spread(model: str) -> None:
    (bare,) = observed(private_batches(1), model=model)
    (noisy,) = observed(private_batches(1), model=model, defense="noise:sigma=0.1")
    (sparse,) = observed(private_batches(1), model=model, defense="sparsify:rate=0.9")
    assert noise_level(noisy.reply) == pytest.approx(0.1, rel=0.05)
    assert noise_level(bare.reply) == noise_level(sparse.reply) == 0
    assert estimate(bare.reply).noise is None
    assert set(trusts(bare.reply, 0.0).values()) == {1.0}
    trust = trusts(noisy.reply, estimate(noisy.reply).noise or 0.0)
    signal = {name: float(t.square().sum() / noisy.reply[name].square().sum()) for name, t in bare.reply.items()}
    large = [name for name, t in bare.reply.items() if t.numel() >= 400]
    assert all(trust[name] == pytest.approx(signal[name], abs=0.15) for name in large)


def test_the_true_update_is_treated_as_the_defense_did() -> None:
    batches = private_batches(2)
    bare = observed(batches)
    for defense in ("none", "clip:bound=2", "sparsify:rate=0.8", "soteria:rate=0.5"):
        seen = observed(batches, defense=defense)
        known = Estimated().extra(seen)
        for i, one in enumerate(seen):
            given = {"reply": one.reply, **tree_map(lambda tensor, i=i: tensor[i], known)}
            treated, reply = Estimated().pair(bare[i].reply, one.reply, given)
            for name, tensor in treated.items():
                torch.testing.assert_close(tensor, one.reply[name], msg=f"{defense} {name}")
                assert torch.equal(reply[name], one.reply[name])


@pytest.mark.integration
@pytest.mark.parametrize("defense", ["sparsify:rate=0.9", "soteria:rate=0.8", "clip:bound=1"])
def test_it_sees_through_defenses_that_leave_things_out(defense: str) -> None:
    batches = private_batches(2)
    seen, private = observed(batches, defense=defense), torch.cat([batch.inputs for batch in batches])
    quality = {}
    for aware in ("false", "true"):
        found = ATTACKS.build(f"ig:aware={aware}", Budget(1, 400))(seen, seeds=[0, 1])
        quality[aware] = float(psnr(torch.cat([one.inputs for one in found]), private).mean())
    assert quality["true"] > quality["false"] + 4, quality


def test_averaging_is_the_mean_over_draws() -> None:
    (one,) = observed(private_batches(1), defense="noise:sigma=0.05")
    averaged, objective = Averaged(one, 3), Cosine()
    by_hand = [
        objective(add(one.reply, {name: drawn[k] for name, drawn in averaged.draws.items()}, 0.05), one.reply)
        for k in range(3)
    ]
    found = averaged(one.reply, lambda update: objective(update, one.reply))
    torch.testing.assert_close(found, torch.stack(by_hand).mean())


def test_a_draw_of_censor_is_orthogonal_and_of_the_same_length() -> None:
    (one,) = observed(private_batches(1), defense="censor")
    averaged = Averaged(one, 1)
    drawn = averaged.draw(one.reply, {name: tensor[0] for name, tensor in averaged.draws.items()})
    for name, tensor in drawn.items():
        assert float(torch.cosine_similarity(tensor.flatten(), one.reply[name].flatten(), dim=0).abs()) < 1e-4
        torch.testing.assert_close(tensor.norm(), one.reply[name].norm())


@pytest.mark.parametrize(
    ("defense", "threat", "words"), [("noise", "B", "needs to know it"), ("clip", "C", "cannot be averaged over")]
)
def test_averaging_needs_a_known_and_random_defense(defense: str, threat: str, words: str) -> None:
    with pytest.raises(GradveilError, match=words):
        ATTACKS.build("ig:draws=2", Budget(1, 1))(
            observed(private_batches(1), defense=defense, threat=threat), seeds=[0]
        )


def test_different_defenses_are_averaged_over_one_by_one() -> None:
    batches = private_batches(1)
    seen = [*observed(batches, defense="noise:sigma=0.1"), *observed(batches, defense="censor")]
    together = ATTACKS.build("ig:draws=2,strategy=vmap", Budget(1, 3))(seen, seeds=[0, 0])
    alone = ATTACKS.build("ig:draws=2,strategy=vmap", Budget(1, 3))(seen[1:], seeds=[0])
    torch.testing.assert_close(together[1].inputs, alone[0].inputs)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(sends="delta", batch_size=8, lr=0.01)])
def test_the_noise_of_dp_is_that_on_the_mean_of_the_batch(recipe: Recipe) -> None:
    batches = private_batches(1, 3)
    (clipped,) = observed(batches, defense="clip:bound=1,per=example", recipe=recipe)
    (noisy,) = observed(batches, defense="dp:sigma=0.1,bound=1", recipe=recipe)
    (channel,) = channels_of(noisy)
    added = subtract(noisy.reply, clipped.reply)
    variance = float(norm(added)) ** 2 / sum(tensor.numel() for tensor in added.values())
    assert variance == pytest.approx((channel.noise or 0) * sum(w**2 for w in channel.counted), rel=0.05)
