"""EfficientNet-Lite (Tan and Le, 2019; the Lite variants of 2020) with its ImageNet weights, frozen: public features.

Batch norms are folded into the convolutions before them. Tensors are buffers that no state dict holds: they are public
constants, as the mean and deviation that a model normalises by are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.assets import fetch
from gradveil.core.errors import BadFileError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.types import Params

SIZES = {"efficientnet-lite0": 224, "efficientnet-lite2": 260}
"""By asset, the side of the pictures that the network was trained on."""
STRIDES = (1, 2, 2, 2, 1, 2, 1)
"""Of the first block in each of the seven stages; a stage ends where the number of channels changes."""
MEAN, SCALE = 0.498, 0.502
_EPS = 1e-3


@dataclass(frozen=True)
class _Layer:
    """A convolution with its batch norm: what it is called, and how it steps."""

    name: str
    norm: str
    stride: int = 1
    bounded: bool = True
    """Whether ReLU6 follows."""


class EfficientNetLite(nn.Module):
    """Pictures [n, 3, side, side] in [0, 1] to features [n, 1280]: the mean over positions behind the last layer."""

    def __init__(self, asset: str, *, progress: Progress = SILENT) -> None:
        super().__init__()
        self.side = SIZES[asset]
        (path,) = fetch(asset, progress=progress).glob("*.pth")
        try:
            weights: Params = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise BadFileError(f"{path} is not a state dict: repair it with: gradveil assets get {asset}") from error
        self._blocks = _blocks(weights)
        for block in self._blocks:
            for layer in block:
                scale = weights[f"{layer.norm}.weight"] / (weights[f"{layer.norm}.running_var"] + _EPS).sqrt()
                shift = weights[f"{layer.norm}.bias"] - weights[f"{layer.norm}.running_mean"] * scale
                folded = weights[f"{layer.name}.weight"] * scale.view(-1, 1, 1, 1)
                self.register_buffer(_attribute(layer), folded, persistent=False)
                self.register_buffer(f"{_attribute(layer)}_bias", shift, persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = (pictures - MEAN) / SCALE
        for block in self._blocks:
            entered = hidden
            for layer in block:
                hidden = self._convolved(layer, hidden)
            if not block[-1].bounded and entered.shape == hidden.shape:
                hidden = hidden + entered
        return hidden.mean(dim=(2, 3))

    def _convolved(self, layer: _Layer, hidden: Tensor) -> Tensor:
        weight, bias = self.get_buffer(_attribute(layer)), self.get_buffer(f"{_attribute(layer)}_bias")
        side, groups = weight.shape[-1], hidden.shape[1] // weight.shape[1]
        # As TensorFlow pads: an odd number of pixels is one more behind than before.
        missing = [
            max(0, (-(-length // layer.stride) - 1) * layer.stride + side - length) for length in hidden.shape[2:]
        ]
        down, across = missing
        padded = F.pad(hidden, (across // 2, across - across // 2, down // 2, down - down // 2))
        out = F.conv2d(padded, weight, bias, stride=layer.stride, groups=groups)
        return F.relu6(out) if layer.bounded else out


def _attribute(layer: _Layer) -> str:
    return layer.name.strip("_").replace("._", "_").replace(".", "_")


def _blocks(weights: Params) -> list[list[_Layer]]:
    """The layers in their order: stem, inverted bottlenecks (expand, by channel, project), head."""
    count = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("_blocks."))
    found, stage, channels = [[_Layer("_conv_stem", "_bn0", stride=2)]], -1, 0
    for number in range(count):
        at = f"_blocks.{number}"
        leaving = len(weights[f"{at}._project_conv.weight"])
        begins = leaving != channels
        stage, channels = stage + begins, leaving
        block = [_Layer(f"{at}._expand_conv", f"{at}._bn0")] if f"{at}._expand_conv.weight" in weights else []
        block.append(_Layer(f"{at}._depthwise_conv", f"{at}._bn1", stride=STRIDES[stage] if begins else 1))
        block.append(_Layer(f"{at}._project_conv", f"{at}._bn2", bounded=False))
        found.append(block)
    return [*found, [_Layer("_conv_head", "_bn1")]]
