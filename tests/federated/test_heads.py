"""Trainings of a head on public features: clients who have features need no backbone, and lose nothing by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradveil.client import cross_entropy
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Params
from gradveil.data import load
from gradveil.defenses import Step, clip
from gradveil.federated import Federation, Training
from gradveil.models import FeatureHead, Functional, PublicFeatures, features

SAMPLES = load("mnist-samples").subset(range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def few_photographs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(features, "PUBLIC", ("cifar10-samples",))
    monkeypatch.setenv("GRADVEIL_CACHE", str(folder))


def trained(partition: str = "iid", defense: str = "veil:rounds=3,bound=0.1,mu=5", bias: bool = False) -> Federation:
    case = Training(
        data="mnist-samples", model=f"features:backbone=scattering,pca=12,bias={bias}", clients=4, rounds=3, lr=2.0,
        algorithm="fedsgd", batch_size=None, server_momentum=0.9, train_mode=False, partition=partition,
        defense=defense,
    )  # fmt: skip
    federation = Federation(case, SAMPLES)
    for number in (1, 2, 3):
        federation.round(number)
    return federation


@pytest.mark.parametrize("defense", ["none", "veil:rounds=3,bound=0.1,mu=5"])
def test_skewed_shares_give_the_model_that_equal_ones_give(defense: str) -> None:
    even, skewed = (trained(partition, defense) for partition in ("iid", "dirichlet:alpha=0.3"))
    assert {len(share) for share in even.shares} == {10} != {len(share) for share in skewed.shares}
    for name, tensor in even.state.params.items():
        torch.testing.assert_close(skewed.state.params[name], tensor, atol=1e-4, rtol=1e-3)


def test_a_reply_from_features_is_the_one_from_pictures() -> None:
    federation = trained(defense="dp:sigma=0,bound=0.1", bias=True)
    assert isinstance(federation.module, PublicFeatures)
    pictures, _ = federation.examples(2, 3)
    for one in (None, pictures):
        run = federation.start(2, 3, broadcasts=3, batch=one, rng=Stream.seeded(0))
        update = run.finish().update
        assert update.keys() == {"head.weight", "head.bias"}
        if one is None:
            expected = update
        else:
            for name, tensor in update.items():
                torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-4)


def test_features_that_are_given_are_used() -> None:
    federation = trained(defense="none")
    before = federation.quality(SAMPLES)
    federation.give_features(SAMPLES, torch.zeros(40, 12))
    assert federation.quality(SAMPLES).loss == pytest.approx(torch.tensor(10.0).log().item(), rel=1e-4)
    assert before.loss != federation.quality(SAMPLES).loss


def step_of(bias: bool, labels: Tensor) -> Step:
    torch.manual_seed(0)
    model = Functional(FeatureHead(nn.Linear(7, 5, bias=bias)))
    batch = Batch(torch.randn(12, 7), labels)
    return Step(
        model=model, loss=cross_entropy, params=model.params, batch=batch, number=1, lr=0.1, rng=Stream.seeded(0)
    )


LABELS = {"classes": torch.arange(12) % 5, "probabilities": torch.rand(12, 5).softmax(dim=1)}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bound", [0.1, 1.0, 1e6])
def test_a_head_is_clipped_as_in_a_plain_loop(bound: float, bias: bool, labels: Tensor) -> None:
    step = step_of(bias, labels)
    total: Params = {}
    for place in range(12):
        alone = step.gradient(step.batch.take(slice(place, place + 1)))
        length = torch.cat([tensor.flatten() for tensor in alone.values()]).norm()
        for name, tensor in alone.items():
            total[name] = total.get(name, 0) + tensor * min(1.0, bound / float(length)) / 12
    found = clip.clipped_mean(step, bound)
    assert found.keys() == total.keys()
    for name, tensor in total.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_an_example_that_cannot_be_bounded_is_left_out_and_the_others_stay(value: float) -> None:
    step = step_of(True, LABELS["classes"])
    odd = step.batch.inputs.clone()
    odd[3] = value
    found = clip.clipped_mean(replace(step, batch=Batch(odd, step.batch.labels)), 0.5)
    rest = clip.clipped_mean(replace(step, batch=step.batch.take(torch.arange(12) != 3)), 0.5)
    for name, tensor in rest.items():
        change = (found[name] * 12 - tensor * 11).norm()
        assert change <= 0.5 * 1.001  # as much as one example may change, and no more


def test_another_loss_takes_the_general_way() -> None:
    step = step_of(True, LABELS["classes"])
    own = replace(step, loss=lambda outputs, targets: 3 * cross_entropy(outputs, targets))
    expected = clip._formed(own, 0.1)[0]
    for name, tensor in clip.clipped_mean(own, 0.1).items():
        torch.testing.assert_close(tensor, expected[name])
    assert clip._of_head(own, 0.1) is None
