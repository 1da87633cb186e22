"""Small networks that train within a minute and keep examples apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradveil import models
from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.data.registry import first_of
from gradveil.defenses import DEFENSES, check_model


@pytest.mark.parametrize(
    ("spec", "data"), [("resnet8", "cifar10-samples"), ("convnet:group_norm=true,width=8", "mnist-samples")]
)
def test_no_example_changes_the_scores_of_another(spec: str, data: str) -> None:
    samples = load(data)
    model = models.build(spec, samples.domain, seed=0).train()
    check_model(DEFENSES.build("veil"), model)
    together, alone = model(samples.batch(range(3)).inputs), model(samples.batch([0]).inputs)
    assert torch.allclose(together[:1], alone, atol=1e-5)
    assert any(isinstance(layer, nn.GroupNorm) for layer in model.modules())
    assert sum(p.numel() for p in model.parameters()) < 100_000


def test_wide_networks_keep_their_groups() -> None:
    model = models.build("resnet18:norm=group", load("cifar10-samples").domain, seed=0)
    assert {layer.num_groups for layer in model.modules() if isinstance(layer, nn.GroupNorm)} == {32}


@pytest.mark.parametrize("spec", ["resnet8:width=3", "resnet8:width=0", "convnet:group_norm=true,width=6"])
def test_a_width_that_groups_do_not_divide_is_refused(spec: str) -> None:
    with pytest.raises(GradveilError, match="width"):
        models.build(spec, load("cifar10-samples").domain, seed=0)


def test_the_first_examples_of_a_set_keep_its_name() -> None:
    samples = load("cifar10-samples")
    few = first_of(samples, 7)
    assert (len(few), few.name) == (7, samples.name)
    assert torch.equal(few.labels, samples.labels[:7])
    assert first_of(samples, None) is samples
    with pytest.raises(GradveilError, match="first is from 1"):
        first_of(samples, 101)
