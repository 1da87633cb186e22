"""VGG networks (Simonyan and Zisserman, ICLR 2015), without dropout, parameters named as torchvision's."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from gradveil.domains import Images
from gradveil.models.building import MODELS, Init, first_operation, initialised, is_small

Head = Literal["auto", "cifar", "imagenet"]

WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, each ending in a max-pool, and a head of one or three linear layers."""

    def __init__(
        self, domain: Images, *, convs: tuple[int, int, int, int, int], batch_norm: bool, head: Head, normalize: bool
    ) -> None:
        super().__init__()
        self.normalize = first_operation(domain, normalize)
        layers: list[nn.Module] = []
        channels = domain.channels
        for width, count in zip(WIDTHS, convs, strict=True):
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                if batch_norm:
                    layers.insert(-1, nn.BatchNorm2d(width))
                channels = width
            # Rounding up changes nothing at 32 or 224, and lets 28x28 images survive five halvings.
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        small = head == "cifar" or (head == "auto" and is_small(domain))
        self.avgpool = nn.AdaptiveAvgPool2d(1 if small else 7)
        self.classifier = nn.Linear(512, domain.classes) if small else _imagenet_head(domain.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.avgpool(self.features(self.normalize(inputs))).flatten(1))
        return out


def _imagenet_head(classes: int) -> nn.Sequential:
    # Identities stand where torchvision has dropout, so that its checkpoints load by name.
    return nn.Sequential(
        nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Identity(),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Identity(),
        nn.Linear(4096, classes),
    )  # fmt: skip


@MODELS.register("vgg11")
def vgg11(
    domain: Images, *, batch_norm: bool = True, head: Head = "auto", normalize: bool = True, init: Init = "default"
) -> VGG:
    """VGG-11; ``head=auto`` is one linear layer for sides up to 64, and the original three above."""
    return initialised(VGG(domain, convs=(1, 1, 2, 2, 2), batch_norm=batch_norm, head=head, normalize=normalize), init)


@MODELS.register("vgg16")
def vgg16(
    domain: Images, *, batch_norm: bool = True, head: Head = "auto", normalize: bool = True, init: Init = "default"
) -> VGG:
    """VGG-16; ``head=auto`` is one linear layer for sides up to 64, and the original three above."""
    return initialised(VGG(domain, convs=(2, 2, 3, 3, 3), batch_norm=batch_norm, head=head, normalize=normalize), init)
