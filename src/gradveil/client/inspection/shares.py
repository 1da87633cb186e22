"""A classifier that lets one class's examples speak much louder than all others, as Fishing does."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradveil.client.inspection.broadcast import Broadcast, Linear
from gradveil.client.inspection.findings import Finding

LOUDER = 30.0
FEWEST_CLASSES = 3
"""Of two classes, one is louder wherever the model leans to the other."""


def silent_rows(broadcast: Broadcast) -> Iterator[Finding]:
    layer = broadcast.classifier
    if layer is None:
        return
    silent = int((layer.weight == 0).all(dim=1).sum())
    if silent and not _starts_silent(broadcast, layer):
        yield Finding(
            check="silent rows",
            where=(f"{layer.name}.weight",),
            sentence=f"{silent} of the classifier's {layer.rows} rows are zero (honest: none), so that only chosen "
            "examples send a gradient into the layers below",
            figure=float(silent),
            bound=0.0,
        )


def _starts_silent(broadcast: Broadcast, layer: Linear) -> bool:
    """Whether the model agreed on has a classifier that starts at zero, as some are built."""
    own = dict(broadcast.module.named_parameters()).get(f"{layer.name}.weight")
    return own is not None and not bool(own.any())


def uneven_rows(broadcast: Broadcast) -> Iterator[Finding]:
    layer = broadcast.classifier
    if layer is None or layer.rows < FEWEST_CLASSES:
        return
    sizes = layer.weight.double().norm(dim=1)  # squares of large numbers are beyond float32
    ratio = _above_the_rest(sizes)
    if ratio > LOUDER:
        yield Finding(
            check="uneven rows",
            where=(f"{layer.name}.weight",),
            sentence=f"the classifier's row of class {int(sizes.argmax())} is {_times(ratio)} as large as any other "
            "(honest: two or three times), so that its examples drown the others in the gradient",
            figure=ratio,
            bound=LOUDER,
        )


def one_class_speaks(broadcast: Broadcast) -> Iterator[Finding]:
    layer = broadcast.classifier
    if layer is None or layer.name not in broadcast.inputs or layer.rows < FEWEST_CLASSES:
        return
    by_example = _loudness(layer, broadcast.inputs[layer.name])
    broken = int((~by_example.isfinite()).any(dim=1).sum())
    if broken:
        yield Finding(
            check="one class speaks",
            where=(layer.name,),
            sentence=f"{broken} examples of the probe have a gradient of NaN or infinity: some numbers are too large",
            figure=float(broken),
            bound=0.0,
        )
        return
    loudness = by_example.mean(dim=0)
    ratio = _above_the_rest(loudness)
    if ratio > LOUDER:
        yield Finding(
            check="one class speaks",
            where=(layer.name,),
            sentence=f"on the probe, examples of class {int(loudness.argmax())} have {_times(ratio)} the gradient of "
            "those of any other class, so that an update shows these alone",
            figure=ratio,
            bound=LOUDER,
        )


def _loudness(layer: Linear, features: Tensor) -> Tensor:
    """How large a gradient each example would send back into the network under each label, [n, classes].

    That gradient is W^T (p - e_y) for probabilities p; its norm needs the products of the rows of W alone.
    """
    weight = layer.weight.double()
    scores = features.double() @ weight.T + (0 if layer.bias is None else layer.bias)
    chance = scores.softmax(dim=-1)
    products = weight @ weight.T
    across = chance @ products
    square = (across * chance).sum(dim=-1, keepdim=True) - 2 * across + products.diagonal()
    return square.clamp(min=0).sqrt()


def _above_the_rest(values: Tensor) -> float:
    """The largest over the second largest value, at most a million; 1 where all are zero."""
    first, second = values.topk(2).values.tolist()
    return 1.0 if first == 0 else min(first / max(second, 1e-12 * first), 1e6)


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio < 1e6 else "a million times or more"
