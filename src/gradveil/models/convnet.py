"""The ConvNet that Soteria and DCS2 defend on CIFAR-10, after Geiping et al.'s "Inverting Gradients" (NeurIPS 2020)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.domains import Images
from gradveil.models.building import MODELS, Init, first_operation, initialised


class ConvNet(nn.Module):
    """Convolutions with batch norm and ReLU, a 3x3 max-pool after the sixth and after the last, one linear layer."""

    def __init__(
        self,
        domain: Images,
        *,
        width: int,
        kernel: int,
        last: int,
        batch_norm: bool,
        group_norm: bool,
        normalize: bool,
    ) -> None:
        super().__init__()
        if min(domain.height, domain.width) < 9:
            raise GradveilError(f"convnet pools by 9 and needs sides of 9 or more, not {domain.height}x{domain.width}")
        if kernel % 2 == 0:
            raise GradveilError(f"convnet needs an odd kernel to keep the size of its maps, not {kernel}")
        self.normalize = first_operation(domain, normalize)
        first, second = [width, 2 * width, 2 * width] + 3 * [4 * width], last * [4 * width]
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = domain.channels
        for index, out in enumerate(first + second):
            if index == len(first):
                layers["pool0"] = nn.MaxPool2d(3)
            layers[f"conv{index}"] = nn.Conv2d(channels, out, kernel, padding=kernel // 2)
            if group_norm:
                layers[f"gn{index}"] = nn.GroupNorm(max(1, out // 4), out)
            elif batch_norm:
                layers[f"bn{index}"] = nn.BatchNorm2d(out)
            layers[f"relu{index}"] = nn.ReLU()
            channels = out
        layers["pool1"] = nn.MaxPool2d(3)
        self.body = nn.Sequential(layers)
        self.linear = nn.Linear(channels * (domain.height // 9) * (domain.width // 9), domain.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.linear(self.body(self.normalize(inputs)).flatten(1))
        return out


@MODELS.register("convnet")
def convnet(
    domain: Images,
    *,
    width: int = 32,
    kernel: int = 3,
    last: int = 3,
    batch_norm: bool = True,
    group_norm: bool = False,
    normalize: bool = True,
    init: Init = "default",
) -> ConvNet:
    """ConvNet of Soteria and DCS2: nine convolutions, two max-pools, one linear layer.

    The sources differ. DCS2 (Table 9) prints widths 32, 64 x2, 128 x3, pool, 128 x3, pool, with 5x5 kernels, and says
    the structure is Soteria's: ``kernel=5``. Soteria's release has 3x3 kernels and a base width of 64, and names two
    layers ``conv6`` in one ordered dictionary, so that it runs two convolutions after the pool: ``width=64,last=2``.
    ``group_norm`` takes the place of batch norm: it keeps examples apart, as ``dp`` needs it.
    """
    if group_norm and width % 4:
        raise GradveilError(f"convnet with group norm needs a width that 4 divides, not {width}")
    model = ConvNet(
        domain, width=width, kernel=kernel, last=last, batch_norm=batch_norm, group_norm=group_norm, normalize=normalize
    )
    return initialised(model, init)
