"""What an honest round cannot make of the last broadcast: other layers, numbers that are none, one layer on its own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from gradveil.client.inspection.broadcast import Broadcast, fits, form
from gradveil.client.inspection.findings import Finding
from gradveil.client.local import cross_entropy
from gradveil.core.types import Params
from gradveil.models.functional import Functional

STEPS = 300.0
"""Local steps of full length, all in one direction, that a round may have in each epoch."""
ALONE = 100.0
PROBED = 2
"""Examples whose gradient is the measure of a step: its order of magnitude is enough."""


def not_finite(sent: Mapping[str, Tensor]) -> Iterator[Finding]:
    bad = {name: int((~torch.isfinite(tensor)).sum()) for name, tensor in sent.items() if tensor.is_floating_point()}
    where = tuple(name for name, count in bad.items() if count)
    if where:
        yield Finding(
            check="not finite",
            where=where,
            sentence=f"{sum(bad.values())} of its numbers are NaN or infinite: training on them sends nothing useful",
            figure=float(sum(bad.values())),
            bound=0.0,
        )


def other_layers(
    module: nn.Module, sent: Mapping[str, Tensor], previous: Mapping[str, Tensor] | None
) -> Iterator[Finding]:
    """Parameters that the agreed model or the last broadcast has not, lacks, or has in another shape or kind."""
    for whose, known in (("the model agreed on", dict(module.named_parameters())), ("the last broadcast", previous)):
        if known is None:
            continue
        where = tuple(sorted(n for n in sent.keys() | known.keys() if _form(sent, n) != _form(known, n)))
        if where:
            yield Finding(
                check="other layers",
                where=where,
                sentence=f"{len(where)} parameters are not as in {whose}, by name, shape or kind of number: a layer "
                "that was added, removed or reshaped can hold a copy of the inputs",
                figure=float(len(where)),
                bound=0.0,
            )


def _form(params: Mapping[str, Tensor], name: str) -> tuple[bool, tuple[int, ...]] | None:
    return form(params[name]) if name in params else None


def unchanged(broadcast: Broadcast) -> Iterator[Finding]:
    sent, previous = broadcast.sent, broadcast.previous
    if previous is None or not fits(broadcast.module, previous) or not fits(broadcast.module, sent):
        return
    if all(torch.equal(tensor, previous[name]) for name, tensor in sent.items()):
        yield Finding(
            check="unchanged",
            severity="note",
            where=tuple(sent),
            sentence="the broadcast is the last one over again: whoever answers twice gives more away about its data",
            figure=0.0,
            bound=0.0,
        )


def moved_alone(broadcast: Broadcast) -> Iterator[Finding]:
    """One layer that went further than hundreds of steps, while no other layer went anywhere near.

    Noise moves all layers alike, and a gradient moves each by some steps: neither passes both bounds.
    """
    previous, probe = broadcast.previous, broadcast.probe
    if previous is None or probe is None or not fits(broadcast.module, previous) or not broadcast.inputs:
        return
    model = Functional(broadcast.module)
    few = probe.take(slice(PROBED))
    step = torch.func.grad(lambda params: model.loss(cross_entropy, params, few.inputs, few.labels))(previous)
    pace = 1.0 if broadcast.recipe is None else broadcast.recipe.lr * broadcast.recipe.epochs
    moved = _by_layer({name: tensor - previous[name] for name, tensor in broadcast.sent.items()})
    steps, per_entry = _by_layer(step), {name: rms for name, (_, rms) in moved.items()}
    layer = max(per_entry, key=lambda name: per_entry[name])
    went = moved[layer][0] / max(pace * steps[layer][0], 1e-12)
    others = max((rms for name, rms in per_entry.items() if name != layer), default=0.0)
    apart = per_entry[layer] / max(others, 1e-12)
    if went > STEPS and apart > ALONE:
        yield Finding(
            check="moved alone",
            where=(layer,),
            sentence=f"it moved by {went:.3g} steps of the learning rate since the last broadcast, and "
            f"{apart:.3g} times as far as any other layer: no average of honest updates does that",
            figure=went,
            bound=STEPS,
        )


def _by_layer(params: Params) -> dict[str, tuple[float, float]]:
    """Norm and root mean square over the parameters of each layer."""
    layers: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in params.items():
        layers[name.rpartition(".")[0]].append(tensor.float().flatten())
    norms = {name: (float(torch.cat(parts).norm()), sum(map(len, parts))) for name, parts in layers.items()}
    return {name: (norm, norm / math.sqrt(count)) for name, (norm, count) in norms.items()}
