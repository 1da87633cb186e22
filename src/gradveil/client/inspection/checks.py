"""The checks of a broadcast: each looks for one thing that an honest server does not send.

A check yields where it looked, a figure, and what that would mean. Beyond its bound the figure is a finding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.client.inspection.broadcast import Finding, InspectedBroadcast, Severity, agreed, form
from gradveil.core.seeding import generator
from gradveil.core.types import Params, cross_entropy
from gradveil.models import Functional


class Measurement(NamedTuple):
    """Where a check looked, how much it found there, and what that means if it is too much."""

    where: str | tuple[str, ...]
    figure: float
    sentence: str


BroadcastCheck = Callable[[InspectedBroadcast], Iterator[Measurement]]
CHECKS: dict[str, Callable[[InspectedBroadcast], list[Finding]]] = {}
"""By name, in the order in which findings are listed."""
MOST_ROWS = 1024
"""Rows of a layer that are compared, evenly spread, however many there are."""
SORTED_ROWS = 64
"""Rows that are sorted: each tells the same story."""
PARALLEL = 0.95
"""The cosine from which two rows count as one: room for a fifth of noise on each."""
FEWEST = 16
"""Rows or columns below which an order, a balance or parallel rows may be chance: 16 biases, once in ten billion."""
FEWEST_CLASSES = 3
"""Of two classes, one is louder wherever the model leans to the other."""
OFF_BALANCE = 0.05
ALONE = 100.0
STEP_EXAMPLES = 2
"""Examples whose gradient is the measure of a step: its order of magnitude is enough."""
LARGEST_RATIO = 1e6


def check(bound: float, severity: Severity = "alarm") -> Callable[[BroadcastCheck], BroadcastCheck]:
    """Register a function as the check of its name."""

    def register(measure: BroadcastCheck) -> BroadcastCheck:
        name = measure.__name__.replace("_", " ")

        def findings(seen: InspectedBroadcast) -> list[Finding]:
            return [
                Finding(
                    check=name,
                    severity=severity,
                    where=(where,) if isinstance(where, str) else where,
                    sentence=sentence,
                    figure=figure,
                    bound=float(bound),
                )
                for where, figure, sentence in measure(seen)
                if figure > bound
            ]

        CHECKS[name] = findings
        return measure

    return register


@check(bound=0)
def not_finite(seen: InspectedBroadcast) -> Iterator[Measurement]:
    tensors = {**seen.sent, **dict(seen.module.named_buffers())}
    bad = {name: int((~torch.isfinite(tensor)).sum()) for name, tensor in tensors.items() if tensor.is_floating_point()}
    where = tuple(name for name, count in bad.items() if count)
    sentence = f"{sum(bad.values())} of its numbers are NaN or infinite: training on them sends nothing useful"
    yield Measurement(where, float(sum(bad.values())), sentence)


@check(bound=0)
def other_layers(seen: InspectedBroadcast) -> Iterator[Measurement]:
    """Parameters that the agreed model or the last broadcast has not, lacks, or has in another shape or kind."""
    forms = {name: form(tensor) for name, tensor in seen.sent.items()}
    previous = None if seen.previous is None else {name: form(tensor) for name, tensor in seen.previous.items()}
    known = {"the model agreed on": agreed(seen.module, seen.sent), "the last broadcast": previous}
    for whose, theirs in known.items():
        if theirs is not None:
            where = tuple(sorted({name for name, _ in forms.items() ^ theirs.items()}))
            yield Measurement(
                where,
                float(len(where)),
                f"{len(where)} parameters are not as in {whose}, by name, shape or kind of number: a layer "
                "that was added, removed or reshaped can hold a copy of the inputs",
            )


@check(bound=0.5)
def copied_rows(seen: InspectedBroadcast) -> Iterator[Measurement]:
    """Rows of a layer that are copies of each other: one linear query asked many times over, as Imprint does."""
    for layer in seen.hidden:
        # only where all of an input arrives: in later layers a single large step makes honest rows parallel
        first = layer is seen.hidden[0] if seen.probe is None else layer.weight.shape[1] == seen.probe.inputs[0].numel()
        weight = layer.weight[:: -(-layer.rows // MOST_ROWS)]
        rows = F.normalize(weight[weight.norm(dim=1) > 0], dim=1)
        if not first or layer.weight.shape[1] < FEWEST or len(rows) < 2:
            continue
        # sorted along any direction, rows that are multiples of each other are neighbours
        along = rows @ torch.randn(rows.shape[1], generator=generator(0, "inspection", "rows")).to(rows)
        rows = rows[along.abs().argsort()]
        same = (rows[1:] * rows[:-1]).sum(dim=1).abs() > PARALLEL
        share = float((F.pad(same, (1, 0)) | F.pad(same, (0, 1))).float().mean())
        yield Measurement(
            layer.name,
            share,
            f"{share:.0%} of its {layer.rows} rows are multiples of another row (honest: none), so that "
            "examples can be told apart by the difference of two rows' gradients",
        )


@check(bound=0.9)
def bias_ladder(seen: InspectedBroadcast) -> Iterator[Measurement]:
    """Biases in order, which sort examples into bins, as Imprint's do."""
    for layer in seen.hidden:
        if layer.bias is None or layer.rows < FEWEST:
            continue
        steps = (layer.bias / layer.weight.norm(dim=1).clamp(min=1e-30)).diff().sign()
        ordered = max(float((steps == way).float().mean()) for way in (1, -1))
        yield Measurement(
            f"{layer.name}.bias",
            ordered,
            f"{ordered:.0%} of its {layer.rows} biases, each over the size of its row, come in order "
            "(by chance: half), as quantiles do that sort examples into bins",
        )


# Trap weights: rows whose negative weights outweigh the positive ones by design, so that each fires for few examples.
# Training may well push rows below zero, dead ones far below, but each by an amount of its own. Only design makes the
# balance of all rows the same, or the positive weights of a row a copy of its negative ones.


@check(bound=10)
def mirrored_rows(seen: InspectedBroadcast) -> Iterator[Measurement]:
    for layer in seen.hidden:
        if min(layer.weight.shape) < FEWEST:
            continue
        rising = layer.weight[:: -(-layer.rows // SORTED_ROWS)].sort(dim=1).values
        half = rising.shape[1] // 2
        negative, positive = -rising[:, :half], rising.flip(1)[:, :half]
        factor = ((positive * negative).sum(dim=1) / negative.square().sum(dim=1).clamp(min=1e-24)).clamp(min=0)
        error = (positive - factor[:, None] * negative).norm(dim=1) / positive.norm(dim=1).clamp(min=1e-12)
        # sorted samples of one distribution differ by about 1 / sqrt(columns) of their size
        too_close = 1 / max(float(error.median()) * math.sqrt(rising.shape[1]), 1e-9)
        yield Measurement(
            f"{layer.name}.weight",
            too_close,
            f"the positive weights of a row are its negative ones over again, {_times(too_close)} closer "
            "than chance makes them, as in rows that are scaled to fire for few examples",
        )


@check(bound=5)
def equal_balance(seen: InspectedBroadcast) -> Iterator[Measurement]:
    for layer in seen.hidden:
        if min(layer.weight.shape) < FEWEST:
            continue
        # the sum of a row over its norm: for weights of random sign, 1 in size and different from row to row
        balance = layer.weight.sum(dim=1) / layer.weight.norm(dim=1).clamp(min=1e-12)
        too_equal = 1 / max(float(balance.std()), 1e-9)
        if float(balance.mean()) < -OFF_BALANCE:
            yield Measurement(
                f"{layer.name}.weight",
                too_equal,
                "negative weights outweigh positive ones in all rows, and by the same amount, "
                f"{_times(too_equal)} closer than chance makes it, so that each row fires for few examples",
            )


# Fishing: a classifier in which the examples of one class have much larger gradients than all others.


@check(bound=30)
def decisive_bias(seen: InspectedBroadcast) -> Iterator[Measurement]:
    """Scores 30 apart make a probability of 1e-13, whatever the example shows."""
    layer = seen.classifier
    if layer is not None and layer.bias is not None:
        apart = float(layer.bias.max() - layer.bias.min())
        yield Measurement(
            f"{layer.name}.bias",
            apart,
            f"the classifier's biases are {apart:.3g} apart (honest: a few units), so that they decide on the "
            "class whatever an example shows, and only chosen examples have a gradient",
        )


@check(bound=0)
def silent_rows(seen: InspectedBroadcast) -> Iterator[Measurement]:
    layer = seen.classifier
    if layer is None:
        return
    own = dict(seen.module.named_parameters()).get(f"{layer.name}.weight")
    if own is None or own.any():  # some models are built with a classifier of zeros
        silent = int((layer.weight == 0).all(dim=1).sum())
        yield Measurement(
            f"{layer.name}.weight",
            float(silent),
            f"{silent} of the classifier's {layer.rows} rows are zero (honest: none), so that only chosen "
            "examples send a gradient into the layers below",
        )


@check(bound=30)
def uneven_rows(seen: InspectedBroadcast) -> Iterator[Measurement]:
    layer = seen.classifier
    if layer is not None and layer.rows >= FEWEST_CLASSES:
        sizes = layer.weight.double().norm(dim=1)  # squares of large numbers are beyond float32
        ratio = _above_the_rest(sizes)
        yield Measurement(
            f"{layer.name}.weight",
            ratio,
            f"the classifier's row of class {int(sizes.argmax())} is {_times(ratio, LARGEST_RATIO)} as large as any "
            "other (honest: two or three times), so that its examples drown the others in the gradient",
        )


@check(bound=30)
def one_class_speaks(seen: InspectedBroadcast) -> Iterator[Measurement]:
    layer = seen.classifier
    if layer is None or layer.name not in seen.inputs or layer.rows < FEWEST_CLASSES:
        return
    # The gradient that an example sends back under a label is W^T (p - e_y) for probabilities p. Its norm needs the
    # products of the rows of W alone: [n, classes].
    weight = layer.weight.double()
    scores = seen.inputs[layer.name].double() @ weight.T + (0 if layer.bias is None else layer.bias)
    shares, products = scores.softmax(dim=-1), weight @ weight.T
    across = shares @ products
    square = (across * shares).sum(dim=-1, keepdim=True) - 2 * across + products.diagonal()
    sizes = square.clamp(min=0).sqrt()
    broken = int((~sizes.isfinite()).any(dim=1).sum())
    if broken:
        sentence = f"{broken} examples of the probe have a gradient of NaN or infinity: some numbers are too large"
        yield Measurement(layer.name, LARGEST_RATIO, sentence)
        return
    by_class = sizes.mean(dim=0)
    ratio = _above_the_rest(by_class)
    yield Measurement(
        layer.name,
        ratio,
        f"on the probe, examples of class {int(by_class.argmax())} have {_times(ratio, LARGEST_RATIO)} the gradient of "
        "those of any other class, so that an update shows these alone",
    )


@check(bound=0, severity="note")
def unchanged(seen: InspectedBroadcast) -> Iterator[Measurement]:
    previous = seen.previous
    if previous is not None and seen.fits(previous) and seen.fits(seen.sent):
        same = all(torch.equal(tensor, previous[name]) for name, tensor in seen.sent.items())
        sentence = "the broadcast is the last one over again: whoever answers twice gives more away about its data"
        yield Measurement(tuple(seen.sent), float(same), sentence)


@check(bound=0)
def shuffled(seen: InspectedBroadcast) -> Iterator[Measurement]:
    """Fresh weights made of the old ones, with which a server asks the same client again."""
    previous = seen.previous
    if previous is None or not seen.fits(previous) or not seen.fits(seen.sent):
        return
    where = tuple(
        name
        for name, tensor in seen.sent.items()
        if tensor.numel() >= FEWEST
        and not torch.equal(tensor, previous[name])
        and torch.equal(tensor.flatten().sort().values, previous[name].flatten().sort().values)
    )
    yield Measurement(
        where,
        float(len(where)),
        f"{len(where)} parameters hold the numbers of the last broadcast in another order (honest: none): such a model "
        "has learned nothing, and each new one asks another question about the same examples",
    )


@check(bound=300)
def moved_alone(seen: InspectedBroadcast) -> Iterator[Measurement]:
    """One layer that went further than 300 steps of full length in each epoch, while no other went anywhere near.

    Noise moves all layers alike, and a gradient moves each by some steps: neither passes both bounds.
    """
    previous, probe = seen.previous, seen.probe
    if previous is None or probe is None or not seen.fits(previous) or not seen.inputs:
        return
    model, few = Functional(seen.module), probe.take(slice(STEP_EXAMPLES))
    step = torch.func.grad(lambda params: model.loss(cross_entropy, params, few.inputs, few.labels))(previous)
    pace = 1.0 if seen.recipe is None else seen.recipe.lr * seen.recipe.epochs
    moved = _by_layer({name: tensor - previous[name] for name, tensor in seen.sent.items()})
    per_entry = {name: norm / math.sqrt(count) for name, (norm, count) in moved.items()}
    layer = max(per_entry, key=lambda name: per_entry[name])
    went = moved[layer][0] / max(pace * _by_layer(step)[layer][0], 1e-12)
    apart = per_entry[layer] / max((*(rms for name, rms in per_entry.items() if name != layer), 1e-12))
    if apart > ALONE:
        yield Measurement(
            layer,
            went,
            f"it moved by {went:.3g} steps of the learning rate since the last broadcast, and "
            f"{apart:.3g} times as far as any other layer: no average of honest updates does that",
        )


def _by_layer(params: Params) -> dict[str, tuple[float, int]]:
    """Norm and number of entries of each layer."""
    layers: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in params.items():
        layers[name.rpartition(".")[0]].append(tensor.float().flatten())
    return {name: (float(torch.cat(parts).norm()), sum(map(len, parts))) for name, parts in layers.items()}


def _above_the_rest(values: Tensor) -> float:
    """The largest over the second largest value; 1 where all are zero."""
    first, second = values.topk(2).values.tolist()
    return 1.0 if first == 0 else min(first / max(second, 1e-12 * first), LARGEST_RATIO)


def _times(ratio: float, largest: float = 1000) -> str:
    words = {1000: "a thousand times or more", LARGEST_RATIO: "a million times or more"}
    return f"{ratio:.0f} times" if ratio < largest else words[largest]
