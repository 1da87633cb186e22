"""LeNet as Zhu et al. use it in "Deep Leakage from Gradients" (NeurIPS 2019): smooth, small, and easy to invert."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.domains import Images
from gradveil.models.building import MODELS, first_operation, initialised

WIDTH = 12
STRIDES = (2, 2, 1, 1)


class LeNet(nn.Module):
    """Four 5x5 convolutions of 12 channels with sigmoids, or three, and one linear layer."""

    def __init__(self, domain: Images, *, normalize: bool, convolutions: int) -> None:
        super().__init__()
        self.normalize = first_operation(domain, normalize)
        layers: list[nn.Module] = []
        channels = domain.channels
        for stride in STRIDES[:convolutions]:
            layers += [nn.Conv2d(channels, WIDTH, kernel_size=5, stride=stride, padding=2), nn.Sigmoid()]
            channels = WIDTH
        self.body = nn.Sequential(*layers)
        # A 5x5 convolution with padding 2 and stride 2 halves a side, rounding up.
        self.fc = nn.Linear(WIDTH * -(-domain.height // 4) * -(-domain.width // 4), domain.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(self.normalize(inputs)).flatten(1))
        return out


@MODELS.register("lenet")
def lenet(
    domain: Images,
    *,
    init: Literal["default", "he", "wide"] = "default",
    normalize: bool = False,
    convolutions: int = len(STRIDES),
) -> LeNet:
    """LeNet of Zhu et al.: four sigmoid convolutions and a linear layer.

    ``init=wide`` draws all weights and biases from U(-0.5, 0.5), as the DLG release does; with PyTorch's default
    initialisation the sigmoids pass on much smaller gradients, and inversion is harder. ``init=he``: N(0, 2 / fan out).
    ``convolutions=3`` is the LeNet of the releases of OUTPOST and, for MNIST, DCS2.
    """
    if convolutions not in (3, 4):
        raise GradveilError(f"lenet has 3 or 4 convolutions, not {convolutions}")
    model = LeNet(domain, normalize=normalize, convolutions=convolutions)
    if init == "wide":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.5, 0.5)
    return initialised(model, "he" if init == "he" else "default")
