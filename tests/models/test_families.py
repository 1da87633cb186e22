"""What is particular to each family: published sizes, initialisations, options and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.domains import Images
from gradveil.models import Normalize, build

IMAGENET = Images(
    channels=3, height=224, width=224, classes=1000, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)


def count(spec: str, domain: Images) -> int:
    return sum(p.numel() for p in build(spec, domain, seed=0).parameters())


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        ("lenet", 19_438),  # 912 + 3 x 3,612 + 7,690
        ("lenet:convolutions=3", 15_826),  # one of 3,612 less
        ("convnet:width=64,last=2", 2_904_970),  # eight 3x3 convolutions with batch norm, as in Soteria's release
        ("mlp:hidden=100,depth=1", 308_310),
        ("resnet18", 11_173_962),
        ("resnet34", 21_282_122),
        ("vgg16", 14_728_266),
        ("vgg16:batch_norm=false", 14_719_818),
    ],
)
def test_sizes_for_cifar(spec: str, parameters: int, cifar: Images) -> None:
    assert count(spec, cifar) == parameters


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        ("resnet18", 11_689_512),  # those of torchvision
        ("resnet50", 25_557_032),
        pytest.param("vgg11:batch_norm=false", 132_863_336, marks=pytest.mark.slow),
        ("vit:dim=768,depth=12,heads=12", 86_567_656),
    ],
)
def test_sizes_for_imagenet(spec: str, parameters: int) -> None:
    assert count(spec, IMAGENET) == parameters


def test_wide_lenet_fills_the_interval(cifar: Images) -> None:
    model = build("lenet:init=wide", cifar, seed=0)
    drawn = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert -0.5 <= float(drawn.min()) < -0.499
    assert 0.499 < float(drawn.max()) <= 0.5
    assert float(drawn.std()) == pytest.approx(12**-0.5, rel=0.02)


LAYERS = (nn.Conv2d, nn.Linear)


@pytest.mark.parametrize("spec", ["lenet", "convnet:width=8", "resnet18", "vgg11", "mlp", "vit:depth=1"])
def test_he_initialisation_has_variance_two_over_fan_out_in_all_layers_but_the_last(spec: str, cifar: Images) -> None:
    plain, drawn = (
        [layer for layer in build(text, cifar, seed=0).requires_grad_(False).modules() if isinstance(layer, LAYERS)]
        for text in (spec, f"{spec}{',' if ':' in spec else ':'}init=he")
    )
    *inner, last = drawn
    for layer in inner:
        fan_out = layer.weight.shape[0] * layer.weight[0, 0].numel()
        assert float(layer.weight.var()) == pytest.approx(2 / fan_out, rel=0.25)
        assert layer.bias is None or not layer.bias.any()
    assert torch.equal(last.weight, plain[-1].weight), "the classifier has PyTorch's"


def test_trained_weights_are_not_initialised_anew(cifar: Images) -> None:
    with pytest.raises(GradveilError, match="no init="):
        build("resnet18:weights=cifar10,init=he", cifar, seed=0)


def test_normalisation_is_inside_and_invisible(cifar: Images) -> None:
    inside, outside = build("resnet18", cifar, seed=0), build("resnet18:normalize=false", cifar, seed=0)
    assert inside.state_dict().keys() == outside.state_dict().keys()
    inputs = torch.rand(2, 3, 32, 32)
    by_hand = (inputs - torch.tensor(cifar.mean).view(3, 1, 1)) / torch.tensor(cifar.std).view(3, 1, 1)
    torch.testing.assert_close(inside(inputs), outside(by_hand))


@pytest.mark.parametrize(
    ("spec", "normalizes"),
    [("lenet", False), ("mlp", False), ("convnet", True), ("resnet18", True), ("vgg11", True), ("vit", True)],
)
def test_who_normalizes_by_default(spec: str, normalizes: bool, cifar: Images) -> None:
    model = build(spec, cifar, seed=0)
    assert any(isinstance(m, Normalize) for m in model.modules()) == normalizes


def test_stem_follows_the_size_of_the_images(cifar: Images) -> None:
    def stem(spec: str, domain: Images) -> tuple[int, ...]:
        first = build(spec, domain, seed=0).get_submodule("conv1")
        assert isinstance(first, nn.Conv2d)
        return first.kernel_size

    assert stem("resnet18", cifar) == stem("resnet18:stem=cifar", IMAGENET) == (3, 3)
    assert stem("resnet18", IMAGENET) == stem("resnet18:stem=imagenet", cifar) == (7, 7)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("vit:patch=5", "patches of 5"),
        ("vit:dim=10,heads=3", "divisible"),
        ("convnet:kernel=4", "odd kernel"),
        ("mlp:depth=-1", "depth"),
        ("lenet:init=huge", "default, he, wide"),
        ("lenet:convolutions=5", "3 or 4 convolutions"),
        ("resnet18:stem=imagenet,weights=cifar10", "cifar stem"),
        ("resnet81", "resnet18"),
    ],
)
def test_refusals_say_what_to_do(spec: str, complaint: str, cifar: Images) -> None:
    with pytest.raises(GradveilError, match=complaint):
        build(spec, cifar, seed=0)


def test_images_too_small_for_the_pools() -> None:
    tiny = Images(channels=1, height=8, width=8, classes=10, mean=(0.5,), std=(0.5,))
    with pytest.raises(GradveilError, match="sides of 9"):
        build("convnet", tiny, seed=0)


@pytest.mark.network
def test_trained_resnet18_knows_cifar10() -> None:
    data = load("cifar10-samples")
    batch = data.batch(range(100))
    with torch.no_grad():
        right = build("resnet18:weights=cifar10", data.domain, seed=0)(batch.inputs).argmax(1) == batch.labels
    assert float(right.float().mean()) >= 0.88  # 93.7% on the whole test set
