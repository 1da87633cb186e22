"""Residual networks (He et al., CVPR 2016), with a stem for small images or for ImageNet's.

Parameters are named as torchvision's; layers keep PyTorch's initialisation, or have torchvision's (``init=he``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.assets import fetch
from gradveil.core.errors import GradveilError
from gradveil.domains import Images
from gradveil.models.building import MODELS, Init, first_operation, initialised, is_small

Stem = Literal["auto", "cifar", "imagenet"]
Norm = Literal["batch", "group"]
"""Group norm keeps examples apart, as ``dp`` needs it."""


def _conv(channels: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)


def _downsample(channels: int, out: int, stride: int) -> nn.Module:
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(_conv(channels, out, 1, stride), nn.BatchNorm2d(out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside the identity (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = _downsample(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


class BottleneckBlock(nn.Module):
    """A 3x3 convolution between two 1x1, beside the identity (ResNet-50 and deeper). The 3x3 carries the stride."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = _downsample(channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    """A stem, up to four stages of residual blocks, average pooling and one linear layer."""

    def __init__(
        self,
        domain: Images,
        *,
        block: type[BasicBlock] | type[BottleneckBlock],
        blocks: tuple[int, ...],
        stem: Stem,
        normalize: bool,
        norm: Norm = "batch",
        width: int = 64,
    ) -> None:
        super().__init__()
        self.normalize = first_operation(domain, normalize)
        small = stem == "cifar" or (stem == "auto" and is_small(domain))
        self.conv1 = _conv(domain.channels, width, 3) if small else _conv(domain.channels, width, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            out, layers = width * 2**stage, []
            for index in range(count):
                layers.append(block(channels, out, stride=2 if stage > 0 and index == 0 else 1))
                channels = out * block.expansion
            stages.append(nn.Sequential(*layers))
        stages += [nn.Identity() for _ in range(4 - len(stages))]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, domain.classes)
        if norm == "group":
            for name, layer in [*self.named_modules()]:
                if isinstance(layer, nn.BatchNorm2d):
                    groups = min(32, layer.num_features // 2)
                    self.set_submodule(name, nn.GroupNorm(groups, layer.num_features))

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.maxpool(F.relu(self.bn1(self.conv1(self.normalize(inputs)))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        scores: Tensor = self.fc(out.mean(dim=(2, 3)))
        return scores


@MODELS.register("resnet8")
def resnet8(
    domain: Images,
    *,
    width: int = 16,
    stem: Stem = "auto",
    normalize: bool = True,
    norm: Norm = "group",
    init: Init = "default",
) -> ResNet:
    """ResNet-8: three stages of one block, 16 channels wide at first and with group norm; it trains within a minute."""
    if width < 2 or width % 2:
        raise GradveilError(f"resnet8 needs an even width of at least 2, not {width}")
    model = ResNet(domain, block=BasicBlock, blocks=(1, 1, 1), stem=stem, normalize=normalize, norm=norm, width=width)
    return initialised(model, init)


@MODELS.register("resnet18")
def resnet18(
    domain: Images,
    *,
    stem: Stem = "auto",
    normalize: bool = True,
    norm: Norm = "batch",
    init: Init = "default",
    weights: Literal["none", "cifar10"] = "none",
) -> ResNet:
    """ResNet-18; ``weights=cifar10`` is a network trained on CIFAR-10 (93.7% test accuracy).

    ``stem=auto`` takes the 3x3 stem for sides up to 64. The trained weights expect plain [0, 1] inputs, so with them
    ``normalize`` is off.
    """
    if weights == "none":
        model = ResNet(domain, block=BasicBlock, blocks=(2, 2, 2, 2), stem=stem, normalize=normalize, norm=norm)
        return initialised(model, init)
    fits = (domain.channels, domain.classes) == (3, 10) and stem != "imagenet" and norm == "batch"
    if not fits or init != "default":
        raise GradveilError(
            "resnet18's weights=cifar10 need 3 channels, 10 classes, the cifar stem, batch norm and no init=; "
            "drop weights="
        )
    model = ResNet(domain, block=BasicBlock, blocks=(2, 2, 2, 2), stem="cifar", normalize=False)
    model.load_state_dict(_cifar10_weights())
    return model


def _cifar10_weights() -> dict[str, Tensor]:
    """The trained state dict, its two foreign names turned into torchvision's."""
    state = torch.load(fetch("cifar-resnet18") / "model_test.pt", map_location="cpu", weights_only=True)
    return {name.replace("shortcut", "downsample").replace("linear", "fc"): tensor for name, tensor in state.items()}


@MODELS.register("resnet34")
def resnet34(
    domain: Images, *, stem: Stem = "auto", normalize: bool = True, norm: Norm = "batch", init: Init = "default"
) -> ResNet:
    """ResNet-34; ``stem=auto`` takes the 3x3 stem for sides up to 64."""
    model = ResNet(domain, block=BasicBlock, blocks=(3, 4, 6, 3), stem=stem, normalize=normalize, norm=norm)
    return initialised(model, init)


@MODELS.register("resnet50")
def resnet50(
    domain: Images, *, stem: Stem = "auto", normalize: bool = True, norm: Norm = "batch", init: Init = "default"
) -> ResNet:
    """ResNet-50; ``stem=auto`` takes the 3x3 stem for sides up to 64."""
    model = ResNet(domain, block=BottleneckBlock, blocks=(3, 4, 6, 3), stem=stem, normalize=normalize, norm=norm)
    return initialised(model, init)


@MODELS.register("resnet152")
def resnet152(
    domain: Images, *, stem: Stem = "auto", normalize: bool = True, norm: Norm = "batch", init: Init = "default"
) -> ResNet:
    """ResNet-152; ``stem=auto`` takes the 3x3 stem for sides up to 64."""
    model = ResNet(domain, block=BottleneckBlock, blocks=(3, 8, 36, 3), stem=stem, normalize=normalize, norm=norm)
    return initialised(model, init)
