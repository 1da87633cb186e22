"""Against PRECODE: its draw is read off the gradient of one example and put back into the model.

In a linear layer with a bias, the gradient of a row of the weight over that of its bias is what entered the layer. The
encoder's gives the representation, and with it mean and deviation of the code; the decoder's gives the code itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional as F

from gradveil.attacks.analytic import entered
from gradveil.attacks.parts.channel import Channel, Span
from gradveil.attacks.parts.counter import CounterMove, against, channels_of
from gradveil.attacks.parts.labels import infer_labels
from gradveil.defenses.precode import Bottleneck, Precode
from gradveil.engine import Given
from gradveil.threat.observation import Observation


@dataclass(frozen=True)
class ReadDraw(CounterMove):
    """The candidate goes through the same draw, and is compared by the layers before the bottleneck."""

    def extra(self, one: Observation) -> Given:
        name = _bottleneck(one)
        return {"buffers": {f"{name}.noise": drawn(one, name)}}

    def kept(self, one: Observation) -> Observation:
        """What stands behind the bottleneck has told the label and the draw, and no more is asked of it."""
        behind = _bottleneck(one).rpartition(".")[0]
        labels = infer_labels([one], one.batch_size or 1)[0]
        before = {name: tensor for name, tensor in one.reply.items() if not name.startswith(f"{behind}.")}
        return replace(one, reply=before, labels=labels)


def counter_move(_defense: Precode, one: Observation) -> CounterMove | None:
    """Of one example, and only where weight and bias were scaled alike."""
    alike = all(channel.bound is None or channel.per != "tensor" for channel in channels_of(one))
    return ReadDraw() if one.batch_size == 1 and alike else None


@against(
    "precode",
    sentence="It reads the bottleneck's draw off the gradient and matches the layers before it.",
    counter_move=counter_move,
)
def channel(_defense: Precode, one: Observation) -> Channel:
    """The draw comes after the bottleneck's first layer: what entered that is as it was."""
    return Channel(span=Span(f"{_bottleneck(one)}.encoder.weight", one.batch_size or 1))


def drawn(one: Observation, name: str) -> Tensor:
    """[1, K]: the noise of the bottleneck of this name."""
    inputs = []
    for layer in (f"{name}.encoder", f"{name}.decoder"):
        weight, bias = one.reply[f"{layer}.weight"], one.reply[f"{layer}.bias"]
        row = bias.abs().argmax()
        inputs.append(entered(weight[row], bias[row]))
    weight, bias = (one.sent[f"{name}.encoder.{key}"] for key in ("weight", "bias"))
    mean, spread = F.linear(inputs[0], weight, bias).chunk(2)
    return ((inputs[1] - mean) / F.softplus(spread)).unsqueeze(0)


def _bottleneck(one: Observation) -> str:
    return next(str(name) for name, layer in one.module.named_modules() if isinstance(layer, Bottleneck))
