"""How an adversary who knows the defense ranks candidates: by what that defense leaves of the gradient.

Each link of a chain of defenses changes the likeness that the links before it left. A defense without a reading, and
one that the likeness so far has no use for, leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.identification.entering import Entering
from gradveil.attacks.identification.likeness import ROUNDING, Angle, ByTensor, Directions, Distance, Likeness
from gradveil.attacks.identification.marks import By, Marks
from gradveil.attacks.identification.perpendicular import Perpendicular
from gradveil.attacks.identification.together import Together
from gradveil.attacks.informed.slices import slices_of
from gradveil.core.registry import split_spec
from gradveil.defenses import DEFENSES, Defense
from gradveil.defenses.outpost import layer_risks, layers
from gradveil.defenses.precode import Bottleneck
from gradveil.models import classifier
from gradveil.threat.observation import Observation

Reading = Callable[[Any, Observation, Likeness], Likeness]
"""(defense, observation, likeness so far) -> likeness."""

_PRUNING = ("soteria", "sparsify", "outpost")
_NOISY = ("noise", "dp", "outpost", "graddefense")
OFF_PATH = 0.1
"""How far, as a share, a mean gradient may be off that was taken along a path that is not known exactly."""


def likeness_for(one: Observation) -> Likeness:
    """The best way to rank under what is known.

    A likelihood needs that one gradient of one example was sent; of several examples, candidates explain it together.
    Where inputs were changed by chance and not all changes are tried, that lacks some who took part: what entered the
    classifier shows them one by one, for fewer than classes. Several steps leave directions, and what is not known the
    angle.
    """
    if one.defense is None:
        return Angle()
    if one.kind != "gradient":
        return _read(one, one.defense, Directions())
    size = one.batch_size or 1
    if size == 1:
        return _read(one, one.defense, Distance() if _can_be_followed(one.defense) else Directions())
    return _of_several(one, one.defense, Together(examples=size))


def _can_be_followed(spec: str) -> bool:
    """Whether what each link did can still be told from what was sent, as a likelihood needs.

    Zeros tell what was not sent, until noise covers them; lengths are followed through one clipping of all there is.
    """
    links: list[tuple[str, Any]] = [(split_spec(link)[0], DEFENSES.build(link)) for link in DEFENSES.links(spec)]
    names = [name for name, _ in links]
    pruned = min((names.index(name) for name in _PRUNING if name in names), default=len(names))
    covered = any(name in _NOISY for name in names[pruned + 1 :])
    clipped = sum(name in ("clip", "dp") for name in names)
    sliced = any(name == "graddefense" and defense.bound is not None for name, defense in links)
    return not covered and not sliced and clipped < 2


def likeness_along(one: Observation) -> Likeness:
    """The same for the mean gradient of several examples along a path that is known roughly."""
    return _of_several(one, one.defense or "none", Together(examples=one.batch_size or 1, rough=OFF_PATH))


def _of_several(one: Observation, defense: str, together: Together) -> Likeness:
    if drawing_inputs(one) is None:
        return _read(one, defense, together)
    return _entering_classifier(one, together.examples) if together.examples < one.domain.classes else Angle()


def marks_for(one: Observation, by: By) -> Likeness:
    """The marks of CENSOR with the options that are known, or else its own defaults."""
    return _read(one, one.defense or "censor", Marks(by=by), only=("censor", "noise", "clip", "dp"))


def drawing_inputs(one: Observation) -> Defense | None:
    """The known defense if it changes inputs by chance, so that a candidate has to be looked at several times."""
    links = DEFENSES.links(one.defense or "none")
    changing = [link for link in links if type(DEFENSES.build(link)).on_inputs is not Defense.on_inputs]
    return DEFENSES.build("+".join(changing)) if changing else None


READINGS: dict[str, Reading] = {}


def _read(one: Observation, spec: str, likeness: Likeness, only: tuple[str, ...] | None = None) -> Likeness:
    for link in DEFENSES.links(spec):
        name = split_spec(link)[0]
        if name in (only or READINGS):
            likeness = READINGS[name](DEFENSES.build(link), one, likeness)
    return likeness


def _reads(*names: str) -> Callable[[Reading], Reading]:
    def keep(reading: Reading) -> Reading:
        READINGS.update(dict.fromkeys(names, reading))
        return reading

    return keep


@_reads("noise")
def _noise(defense: Any, _: Observation, likeness: Likeness) -> Likeness:
    return _noisier(likeness, defense.sigma**2)


@_reads("clip")
def _clip(defense: Any, _: Observation, likeness: Likeness) -> Likeness:
    per = getattr(defense, "per", "example")
    if isinstance(likeness, Together):
        return replace(likeness, bound=defense.bound) if per == "example" else replace(likeness, scaled=True)
    if not isinstance(likeness, Distance | Marks):
        return likeness
    return replace(likeness, bound=defense.bound, per="layer" if per == "layer" else "global")


@_reads("dp")
def _dp(defense: Any, one: Observation, likeness: Likeness) -> Likeness:
    return _noisier(_clip(defense, one, likeness), (defense.sigma * defense.bound) ** 2)


@_reads("soteria")
def _soteria(_defense: Any, _: Observation, likeness: Likeness) -> Likeness:
    return _laid_out(likeness, only_sent=True)


@_reads("sparsify")
def _sparsify(_defense: Any, _: Observation, likeness: Likeness) -> Likeness:
    return _laid_out(likeness, only_sent=True, largest=True)


@_reads("outpost")
def _outpost(defense: Any, one: Observation, likeness: Likeness) -> Likeness:
    """The largest entries of each layer, with noise in proportion to the spread of the layer's weights.

    The broadcast shows that spread, and which entries are sent does not depend on the noise.
    """
    groups = layers(one.sent)
    risks = (defense.scale * layer_risks(one.sent, groups)).square().tolist()
    more = {name: risk for names, risk in zip(groups, risks, strict=True) for name in names}
    pruned = _laid_out(likeness, only_sent=True, largest=True)
    return replace(pruned, more=more) if isinstance(pruned, Distance) else pruned


@_reads("graddefense")
def _graddefense(defense: Any, one: Observation, likeness: Likeness) -> Likeness:
    """Noise on slices that are drawn; where they lie follows from public images, and is computed as the client does."""
    several_steps = isinstance(likeness, Directions) and one.kind != "gradient"
    if several_steps or not isinstance(likeness, Distance | Directions | Together):
        return likeness
    cuts = {name: _run_lengths(where) for name, where in slices_of(defense, one).items()}
    if isinstance(likeness, Together):
        return replace(likeness, cuts=cuts, scaled=likeness.scaled or defense.bound is not None)
    drawn = {"sometimes": defense.sigma**2} if isinstance(likeness, Distance) else {}
    return _laid_out(replace(likeness, **drawn), cuts=cuts)


@_reads("dcs2", "dcs2plus")
def _dcs2(defense: Any, one: Observation, likeness: Likeness) -> Likeness:
    """Gradients of concealed examples were added: what entered the classifier is the private examples' and theirs.

    Slopes add up to zero over the classes: one more vector than the others, and the span shows nothing.
    """
    size = one.batch_size or 1
    examples = size + defense.k * (1 if defense.sensitive == "first" else size)
    return likeness if size > 1 and examples >= one.domain.classes else _entering_classifier(one, examples)


@_reads("precode")
def _precode(_defense: Any, one: Observation, _: Likeness) -> Likeness:
    """The draw comes after the bottleneck's first layer: what entered that is as it was."""
    (name,) = (name for name, layer in one.module.named_modules() if isinstance(layer, Bottleneck))
    return Entering(weight=f"{name}.encoder.weight", examples=one.batch_size or 1)


@_reads("censor")
def _censor(defense: Any, _: Observation, likeness: Likeness) -> Likeness:
    if isinstance(likeness, Together):
        return _censored_batch(defense, likeness)
    earlier = likeness if isinstance(likeness, Distance | Marks) else Marks()
    return Marks(
        by=likeness.by if isinstance(likeness, Marks) else "both",
        variance=earlier.variance,
        bound=earlier.bound,
        per=earlier.per,
        whole=not defense.layerwise,
        spread={"preserve": 0.0, "random": defense.spread, "public": None}[defense.norms],
        released=defense.projection == "released",
        plain=defense.fallback == "original" or defense.rounds is not None,
    )


def _censored_batch(defense: Any, together: Together) -> Likeness:
    """The marks are those of the whole batch's gradient: no candidate has them by itself, but the right set has.

    Not so after several steps, whose sum is at right angles to nothing, nor with one angle for all tensors.
    """
    several_steps = together.rough > ROUNDING
    if several_steps or not defense.layerwise or defense.projection == "released":
        return Angle()
    plain = defense.fallback == "original" or defense.rounds is not None
    return Perpendicular(examples=together.examples, otherwise=together if plain else None)


def _entering_classifier(one: Observation, examples: int) -> Likeness:
    return Entering(weight=f"{classifier(one.module, one.domain)}.weight", examples=examples)


def _noisier(likeness: Likeness, variance: float) -> Likeness:
    if isinstance(likeness, Together) and likeness.pruned:
        return replace(likeness, covered=(likeness.covered**2 + variance) ** 0.5)
    if not isinstance(likeness, Distance | Marks):
        return likeness
    return replace(likeness, variance=likeness.variance + variance)


def _laid_out(likeness: Likeness, **changes: Any) -> Likeness:
    if isinstance(likeness, Together):
        return replace(likeness, pruned=True) if changes.get("only_sent") else likeness
    if not isinstance(likeness, ByTensor):
        return likeness
    return replace(likeness, layout=replace(likeness.layout, **changes))


def _run_lengths(where: Tensor) -> list[int]:
    """How many entries in a row lie in the same slice."""
    counts: list[int] = torch.unique_consecutive(where.flatten(), return_counts=True)[1].tolist()
    return counts
