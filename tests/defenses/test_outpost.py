from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Params, Recipe
from gradveil.defenses import DEFENSES, Log, Step, clip, outpost
from steps import step_on

LENET = [[f"{layer}.weight", f"{layer}.bias"] for layer in ("body.0", "body.2", "body.4", "body.6", "fc")]


def defended(spec: str, gradient: Params, step: Step, seed: int = 0, number: int = 1) -> Params:
    fresh = replace(step, rng=Stream.seeded(seed, "defense"), number=number)
    return DEFENSES.build(spec).on_gradient(gradient, fresh)


def flat(tree: Params, names: list[str]) -> Tensor:
    return torch.cat([tree[name].flatten() for name in names])


@pytest.mark.integration
@pytest.mark.parametrize("number", [2, 10, 40])
def test_steps_are_perturbed_with_a_falling_probability(number: int) -> None:
    gradient, step = {"fc.weight": torch.randn(2, 3)}, step_on("lenet", examples=1)[1]
    step = replace(step, params={"fc.weight": torch.randn(2, 3)}, log=Log())
    changed = 0
    for seed in range(2000):
        sent = defended("outpost", gradient, step, seed, number)
        same = sent is gradient
        assert step.log.values("perturbed")[-1] == float(not same)
        changed += not same
    expected = 1 / (1 + 0.1 * number)
    assert changed / 2000 == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 2000) ** 0.5)


def test_the_first_step_is_always_perturbed_and_others_may_stay_as_they_are() -> None:
    gradient, step = step_on("lenet")
    for seed in range(20):
        assert not torch.equal(defended("outpost:beta=1e9", gradient, step, seed)["fc.weight"], gradient["fc.weight"])
        assert defended("outpost:beta=1e9", gradient, step, seed, number=2) is gradient
        assert defended("outpost:beta=0", gradient, step, seed, number=1000) is not gradient
    assert step.log.means()["perturbed"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("model", "rho"), [("lenet", 80.0), ("lenet", 35.0), ("convnet:width=8", 80.0)])
def test_the_smallest_entries_of_each_layer_are_pruned(model: str, rho: float) -> None:
    gradient, step = step_on(model)
    sent = defended(f"outpost:scale=0,rho={rho}", gradient, step)
    for names in outpost.layers(gradient):
        before, after = flat(gradient, names), flat(sent, names)
        kept = after != 0
        assert abs(int((~kept).sum()) - rho / 100 * len(before)) <= 0.5 + int((before == 0).sum())
        assert torch.equal(after[kept], before[kept])
        if kept.any():
            assert before[kept].abs().min() >= before[~kept].abs().max()
    assert step.log.means()["pruned"] == pytest.approx(rho / 100, abs=0.01)


def test_noise_lies_on_the_entries_of_the_highest_fisher_information() -> None:
    gradient, step = step_on("lenet:init=wide")
    draws = [defended("outpost:rho=0,phi=40", gradient, step, seed) for seed in range(30)]
    for names in LENET:
        noise = torch.stack([flat(sent, names) - flat(gradient, names) for sent in draws]).double()
        touched = (noise != 0).any(0)
        assert int(touched.sum()) == round(0.4 * noise.shape[1])
        squares = flat(gradient, names).square()
        assert squares[touched].min() >= squares[~touched].max()
        weights = step.params[names[0]].double()
        risk = (weights - weights.mean()).square().mean()
        assert noise[:, touched].std().item() == pytest.approx(0.8 * risk.item(), rel=0.1), names
        assert noise[:, touched].mean().abs() < 0.1 * risk


def test_pruned_entries_get_noise_where_their_fisher_information_is_high() -> None:
    gradient, step = step_on("lenet:init=wide")
    sent = defended("outpost", gradient, step)
    for names in LENET:
        ranks = flat(gradient, names).abs().argsort(descending=True)
        after = flat(sent, names)[ranks]
        before, fifth = flat(gradient, names)[ranks], round(0.4 * len(ranks)) // 2
        assert (after[: 2 * fifth - 1] != 0).all(), "40% carry noise"
        assert (after[2 * fifth + 1 :] == 0).all(), "the rest is pruned"
        added = after - torch.where(torch.arange(len(ranks)) < len(ranks) - round(0.8 * len(ranks)), before, 0)
        assert added[: 2 * fifth].double().std() < 0.8 * 1 / 12 * 1.5, "no gradient of a pruned entry is left"


@pytest.mark.parametrize("at_once", [2**26, 1])
def test_fisher_information_of_single_examples(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip, "ENTRIES_AT_ONCE", at_once)
    gradient, step = step_on("lenet:init=wide", examples=6)
    fisher = {name: torch.zeros_like(g) for name, g in gradient.items()}
    for place in range(6):
        alone = step.gradient(SAMPLES.batch([place]))
        fisher = {name: fisher[name] + alone[name] ** 2 / 6 for name in fisher}
    sent = defended("outpost:rho=0,fisher=example", gradient, step)
    for names in LENET:
        touched = flat(sent, names) != flat(gradient, names)
        information = flat(fisher, names)
        assert abs(int(touched.sum()) - 0.4 * len(touched)) <= 0.5
        assert information[touched].min() >= information[~touched].max() * (1 - 1e-4)
        of_batch = flat(gradient, names).square()
        assert of_batch[touched].min() < of_batch[~touched].max(), "the squared batch gradient would choose others"


@pytest.mark.parametrize("model", ["lenet:init=wide", "convnet:width=8", "vit:depth=1,dim=48"])
@pytest.mark.parametrize("fisher", ["batch", "example"])
def test_numpy_and_torch_agree(model: str, fisher: str) -> None:
    gradient, step = step_on(model)
    wide = {name: g.double() for name, g in gradient.items()}  # numpy is for the usual floats
    by_numpy, by_torch = (defended(f"outpost:fisher={fisher}", tree, step) for tree in (gradient, wide))
    for name, sent in by_torch.items():
        assert torch.allclose(by_numpy[name].double(), sent, rtol=1e-4, atol=1e-7), name
    mine, other = step.log.values("risk")
    assert mine == pytest.approx(other, rel=1e-5)


def test_a_gradient_that_is_not_a_number_is_sent_as_such() -> None:
    gradient, step = step_on("lenet")
    gradient["fc.weight"][0, :2] = float("nan")
    sent = defended("outpost", gradient, step)
    assert sent["fc.weight"][0, :2].isnan().all()
    assert sent["fc.bias"].isfinite().all()


def test_risk_is_the_variance_of_the_weights_and_at_most_one() -> None:
    weights = torch.tensor([0.1, 0.5, -0.3, 0.3])
    variance = ((weights - 0.15) ** 2).mean().item()
    params = {
        "fc.weight": weights, "fc.bias": torch.tensor([9.0]), "wide.weight": 100 * weights, "only.bias": weights,
        "gain": torch.tensor(3.0),
    }  # fmt: skip
    assert outpost.layer_risks(params, outpost.layers(params)).tolist() == pytest.approx([variance, 1, variance, 0])


def test_wide_layers_get_the_noise_of_risk_one() -> None:
    gradient, step = step_on("lenet")
    step = replace(step, params={**step.params, "fc.weight": 1000 * step.params["fc.weight"]})
    sent = defended("outpost:rho=100,phi=100", gradient, step)
    assert flat(sent, LENET[-1]).std().item() == pytest.approx(0.8, rel=0.03)
    assert flat(sent, LENET[0]).std() < 0.01


def test_untrained_batch_norm_gets_no_noise() -> None:
    gradient, step = step_on("convnet:width=8")
    norms = [n for names in outpost.layers(gradient) if step.params[names[0]].ndim == 1 for n in names]
    assert norms
    sent = defended("outpost:rho=0", gradient, step)
    assert all(torch.equal(sent[name], gradient[name]) for name in norms)


def test_layers_are_the_tensors_of_one_module() -> None:
    assert outpost.layers(step_on("lenet")[0]) == LENET
    assert outpost.layers({"token": torch.ones(1), "a.weight": torch.ones(1)}) == [["token"], ["a.weight"]]


def test_part_of_the_parameters_may_be_frozen() -> None:
    gradient, step = step_on("lenet")
    trained = {name: g for name, g in gradient.items() if name != "fc.bias"}
    params = {name: step.params[name] for name in trained}
    part = replace(step, params=params, frozen={"fc.bias": step.params["fc.bias"]})
    of_batch, of_examples = (defended(f"outpost:fisher={fisher}", trained, part) for fisher in ("batch", "example"))
    assert of_batch.keys() == of_examples.keys() == trained.keys()
    assert (of_batch["fc.weight"] == 0).float().mean().item() == pytest.approx(0.6, abs=0.01)
    assert 0.4 <= (of_examples["fc.weight"] == 0).float().mean().item() < 0.6, "kept entries need not carry noise"


@pytest.mark.integration
def test_a_local_run_counts_its_steps_over_all_epochs() -> None:
    recipe = Recipe(sends="delta", epochs=20, batch_size=2, lr=1e-3)
    client = SimulatedClient(
        models.build("lenet", SAMPLES.domain, seed=0), recipe=recipe, defense=DEFENSES.build("outpost")
    )
    logs = [client.reply(client.model.params, SAMPLES.batch(range(8)), Stream.seeded(seed)).log for seed in range(8)]
    perturbed = torch.tensor([log.values("perturbed") for log in logs])
    assert perturbed.shape == (8, 80)
    assert perturbed[:, 0].all()
    expected = torch.tensor([1.0] + [1 / (1 + 0.1 * number) for number in range(2, 81)])
    for steps in (slice(0, 20), slice(20, 80)):
        deviation = (8 * (expected * (1 - expected))[steps].sum()) ** 0.5
        assert abs(perturbed[:, steps].sum() - 8 * expected[steps].sum()) < 3 * deviation


RELEASED = "outpost:per=tensor,threshold=all,fisher=outputs,first=false"


def test_the_released_reading_is_what_the_release_computes() -> None:
    """Written from a description of the release: percentiles by numpy, one tensor after the other."""
    gradient, step = step_on("lenet:init=wide")
    sent = defended(f"{RELEASED},beta=0", gradient, step, seed=3)
    information = {name: np.square(g.numpy()).mean(0) for name, g in gradient.items()}
    bar = np.percentile(np.concatenate([value.ravel() for value in information.values()]), 60)
    for name, g in gradient.items():
        entries, after = g.numpy(), sent[name].numpy()
        kept = np.where(np.abs(entries) < np.percentile(np.abs(entries), 80), 0, entries)
        noisy = np.broadcast_to(information[name] >= bar, entries.shape)
        assert np.array_equal(after[~noisy], kept[~noisy]), name
        if noisy.sum() > 100:
            deviation = 0.8 * step.params[name].var().item()
            assert (after - kept)[noisy].std() == pytest.approx(deviation, rel=0.2), name
    shares = {name: float((sent[name] != 0).float().mean()) for name in gradient}
    assert max(shares.values()) - min(shares.values()) > 0.4, "one threshold: some tensors are all noise, others none"
    assert step.log.means()["pruned"] == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("fisher", ["batch", "outputs"])
def test_tensors_alone_have_their_own_risk_and_shares(fisher: str) -> None:
    gradient, step = step_on("lenet:init=wide")
    sent = defended(f"outpost:per=tensor,scale=0,fisher={fisher}", gradient, step)
    for name, g in gradient.items():
        assert int((sent[name] == 0).sum()) == pytest.approx(0.8 * g.numel(), abs=0.51 + int((g == 0).sum())), name
    risks = outpost.layer_risks(step.params, outpost.Outpost(per="tensor").groups(step.params))
    assert risks.tolist() == pytest.approx([p.var(correction=0).item() for p in step.params.values()], rel=1e-5)


def test_the_first_step_of_the_release_is_like_any_other() -> None:
    gradient, step = step_on("lenet")
    alone = [defended("outpost:beta=1,first=false", gradient, step, seed) is gradient for seed in range(60)]
    assert sum(alone) == pytest.approx(30, abs=15)
    model, recipe = models.build("lenet", SAMPLES.domain, seed=0), Recipe()
    client = SimulatedClient(model, recipe=recipe, defense=DEFENSES.build("outpost:beta=1,first=false"))
    logs = [client.reply(client.model.params, SAMPLES.batch([0]), Stream.seeded(seed)).log for seed in range(60)]
    assert sum(log.means()["perturbed"] for log in logs) == pytest.approx(30, abs=15)


@pytest.mark.parametrize("bad", ["phi=101", "rho=-1"])
def test_shares_are_percentages(bad: str) -> None:
    with pytest.raises(GradveilError, match=f"outpost: {bad[:3]} is a percentage from 0 to 100"):
        DEFENSES.build(f"outpost:{bad}")


def test_a_share_that_is_no_number_is_refused_from_python_too() -> None:
    with pytest.raises(GradveilError, match="outpost: phi is a percentage"):
        outpost.Outpost(phi=float("nan"))


@pytest.mark.parametrize("bad", ["scale=-1", "beta=-0.1"])
def test_negative_options_are_refused(bad: str) -> None:
    with pytest.raises(GradveilError, match=f"outpost: {bad.partition('=')[0]} is at least 0"):
        DEFENSES.build(f"outpost:{bad}")
