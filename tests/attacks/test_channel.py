"""What an adversary estimates of a defense from an update alone, and draws of a defense that it knows."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.channel import (
    Estimated,
    clip_bounds,
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


@pytest.mark.parametrize("per", ["layer", "global"])
@pytest.mark.parametrize("model", [*MODELS, "lenet"])
def test_each_tensor_has_the_norm_it_was_clipped_to(model: str, per: str) -> None:
    (bare,) = observed(private_batches(1), model=model)
    norms = {name: float(tensor.norm()) for name, tensor in bare.reply.items()}
    bound = sorted(norms.values())[-1] / 2
    (clipped,) = observed(private_batches(1), model=model, defense=f"clip:bound={bound},per={per}")
    factor = bound / float(norm(bare.reply))
    expected = {name: factor * each if per == "global" else min(bound, each) for name, each in norms.items()}
    assert clip_bounds(clipped.reply, dict.fromkeys(norms, 1.0)) == pytest.approx(expected, rel=1e-4, abs=1e-14)


@pytest.mark.parametrize(("per", "clipped"), [("layer", 4.0), ("global", 3.97)])
def test_the_noise_after_a_clip_is_no_part_of_the_bound(per: str, clipped: float) -> None:
    (noisy,) = observed(private_batches(1), model="lenet", defense=f"clip:bound=4,per={per}+noise:sigma=0.02")
    bounds = clip_bounds(noisy.reply, trusts(noisy.reply, noise_level(noisy.reply) ** 2))
    assert float(noisy.reply["fc.weight"].norm()) > 4.3
    assert bounds["fc.weight"] == pytest.approx(clipped, rel=0.02)


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
    for defense in (
        "none",
        "clip:bound=2",
        "clip:bound=2,per=global",
        "sparsify:rate=0.8",
        "sparsify:rate=0.8+clip:bound=2",
        "clip:bound=2+sparsify:rate=0.8",
        "soteria:rate=0.5",
    ):
        seen = observed(batches, defense=defense)
        known = Estimated().extra(seen)
        for i, one in enumerate(seen):
            given = {"reply": one.reply, **tree_map(lambda tensor, i=i: tensor[i], known)}
            treated, reply = Estimated().pair(bare[i].reply, one.reply, given)
            for name, tensor in treated.items():
                torch.testing.assert_close(tensor, one.reply[name], msg=f"{defense} {name}")
                assert torch.equal(reply[name], one.reply[name])


def test_candidates_may_be_pruned_anew() -> None:
    """The true update to what was sent; another one to as many entries of its own; Soteria's columns as they are."""
    batches = private_batches(2)
    bare, sparse = observed(batches), observed(batches, defense="sparsify:rate=0.9")
    about = Estimated(anew=True).extra(sparse[:1])
    given = {"reply": sparse[0].reply, **tree_map(lambda tensor: tensor[0], about)}
    own, _ = Estimated(anew=True).pair(bare[0].reply, sparse[0].reply, given)
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, sparse[0].reply[name])
    other, _ = Estimated(anew=True).pair(bare[1].reply, sparse[0].reply, given)
    left, sent = other["fc.weight"] != 0, sparse[0].reply["fc.weight"] != 0
    assert left.sum() == sent.sum()
    assert (left != sent).any()
    (pruned,) = observed(batches[:1], defense="soteria:rate=0.8")
    assert not any(bool(tensor.any()) for tensor in Estimated(anew=True).extra([pruned])["sparse"].values())


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


def test_gradients_may_be_averaged_before_they_are_compared() -> None:
    (one,) = observed(private_batches(1), defense="noise:sigma=0.05")
    averaged, objective = Averaged(one, 4, "gradients"), Cosine()
    mean = {name: drawn.mean(dim=0) for name, drawn in averaged.draws.items()}
    by_hand = objective(add(one.reply, mean, 0.05), one.reply)
    torch.testing.assert_close(averaged(one.reply, lambda update: objective(update, one.reply)), by_hand)
    assert by_hand < Averaged(one, 4)(one.reply, lambda update: objective(update, one.reply))


def test_the_nearest_draw_alone_may_count() -> None:
    (one,) = observed(private_batches(1), defense="noise:sigma=0.05")
    nearest, objective = Averaged(one, 4, "nearest"), Cosine()
    by_hand = [
        objective(add(one.reply, {name: drawn[k] for name, drawn in nearest.draws.items()}, 0.05), one.reply)
        for k in range(4)
    ]
    found = nearest(one.reply, lambda update: objective(update, one.reply))
    torch.testing.assert_close(found, min(by_hand))
    assert found < Averaged(one, 4)(one.reply, lambda update: objective(update, one.reply))


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
