"""PRECODE's draw, read off the gradient of one example and put back into the model.

In a linear layer with a bias, the gradient of a row of the weight over that of its bias is what entered the layer. The
encoder's gives the representation, and with it mean and deviation of the code; the decoder's gives the code itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

from gradveil.attacks.counter import Counter
from gradveil.attacks.engine import Given
from gradveil.attacks.parts.labels import infer_labels
from gradveil.core.types import Params
from gradveil.defenses.precode import Bottleneck
from gradveil.threat.observation import Observation


@dataclass(frozen=True)
class ReadDraw(Counter):
    """The candidate goes through the same draw, and is compared by the layers before the bottleneck."""

    def known(self, one: Observation) -> Given:
        name = _bottleneck(one)
        return {"buffers": {f"{name}.noise": drawn(one, name)}}

    def shown(self, one: Observation) -> Observation:
        """What stands behind the bottleneck has told the label and the draw, and no more is asked of it."""
        behind = _bottleneck(one).rpartition(".")[0]
        labels = infer_labels([one], one.batch_size or 1)[0]
        before = {name: tensor for name, tensor in one.reply.items() if not name.startswith(f"{behind}.")}
        return replace(one, reply=before, labels=labels)


def _bottleneck(one: Observation) -> str:
    return next(str(name) for name, layer in one.module.named_modules() if isinstance(layer, Bottleneck))


def drawn(one: Observation, name: str) -> Tensor:
    """[1, K]: the noise of the bottleneck of this name."""
    weight, bias = (one.sent[f"{name}.encoder.{key}"] for key in ("weight", "bias"))
    mean, spread = F.linear(_entered(one.reply, f"{name}.encoder"), weight, bias).chunk(2)
    return ((_entered(one.reply, f"{name}.decoder") - mean) / F.softplus(spread)).unsqueeze(0)


def _entered(reply: Params, layer: str) -> Tensor:
    """What entered a linear layer, from the row with the largest gradient."""
    bias = reply[f"{layer}.bias"]
    row = bias.abs().argmax()
    return reply[f"{layer}.weight"][row] / bias[row]
