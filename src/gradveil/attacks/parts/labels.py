"""Reading the private labels off the gradient of the classifier's last layer, before any search.

Row k of that gradient, with the bias as one more column, is the mean over the batch of (p_k - [k is the label]) h: the
prediction's error times the representation h, whose last entry is 1. The adversary has the model, so it can compute
what h and p look like on random inputs.

After several local steps the predictions have moved, so the counts read off the sum of the steps are only a first
guess. The adversary knows the recipe: it repeats the local run on random inputs with other labels, one changed or two
swapped at a time, and keeps what brings the last layer's bias nearer to the one it saw. That also settles the order of
the labels as far as mini-batches make it matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vmap

from gradveil.attacks.parts.channel import RightAngle
from gradveil.attacks.parts.counter import channels_of
from gradveil.attacks.parts.right_angle_labels import StandIns, bare_replies, labels_at_right_angles
from gradveil.attacks.parts.updates import gradient_scale, local_steps
from gradveil.client.local import local_update
from gradveil.core.seeding import generator
from gradveil.models import Functional, classifier, logits_of, representation
from gradveil.threat.observation import Observation

_PROBES = 64
_ALIKE = 0.3
_MOST = 8
"""Labels of more examples are not tried out: there the counts are what matters, and it would outlast the attack."""
_FEW_CLASSES = 100
"""Classes up to which sets of labels are tried under CENSOR."""
_LARGE = 1_000_000
"""Parameters from which on only the classifier is trained to try labels out: a few steps hardly move what comes before
it, and hundreds of local runs of the whole would take longer than the attack."""


def infer_labels(seen: Sequence[Observation], batch_size: int) -> Tensor:
    """The labels behind each reply, [N, batch_size]; granted ones are taken as they are."""
    broadcasts: dict[int, list[int]] = {}
    found: dict[int, Tensor] = {}
    known: dict[int, StandIns] = {}
    for i, one in enumerate(seen):
        angle = _right_angle(one, batch_size)
        if angle is None:
            broadcasts.setdefault(id(one.sent), []).append(i)
        else:
            found[i] = labels_at_right_angles(one, batch_size, angle, known)
    for places in broadcasts.values():  # of each the model is asked what it predicts
        found |= zip(places, _read([seen[i] for i in places], batch_size), strict=True)
    return torch.stack([found[i] for i in range(len(seen))])


def _right_angle(one: Observation, batch_size: int) -> RightAngle | None:
    """The known right angle between reply and gradient, where the last layer has one of its own; None elsewhere."""
    few = batch_size == 1 or (batch_size <= _MOST and one.domain.classes <= _FEW_CLASSES)
    if one.labels is not None or one.kind != "gradient" or not few:
        return None
    name = classifier(one.module, one.domain)
    if f"{name}.weight" not in one.sent or not {f"{name}.weight", f"{name}.bias"} & one.reply.keys():
        return None
    channels = channels_of(one)
    angles = [channel.right_angle for channel in channels if channel.right_angle is not None]
    if len(angles) != 1 or len(channels) != 1 or angles[0].whole or not angles[0].exact:
        return None
    bare = bare_replies(one, angles[0])
    return None if bare is None or any(other is one for other in bare) else angles[0]


def prediction_errors(seen: Sequence[Observation]) -> Tensor:
    """[N, classes]: the mean over each batch of p_k - [k is the label], up to a positive factor for one example.

    Every row is a multiple of h; its product with a typical h tells which. That averages noise over the whole row,
    where the bias alone would be one noisy number. If the rows look nothing like a typical h, the bias has to do.
    """
    one, name = seen[0], classifier(seen[0].module, seen[0].domain)
    signs = [1.0 if o.kind == "gradient" else -1.0 for o in seen]  # a difference of parameters points against it
    weight, bias = f"{name}.weight", f"{name}.bias"
    if weight not in one.reply:  # frozen
        if bias not in one.reply:
            return torch.stack([sign * _output_change(o) for sign, o in zip(signs, seen, strict=True)])
        return torch.stack([sign * o.reply[bias] for sign, o in zip(signs, seen, strict=True)])
    rows = torch.stack([sign * o.reply[weight] for sign, o in zip(signs, seen, strict=True)])
    with torch.no_grad():
        typical = representation(one.module, one.domain)(_probes(one), one.sent).mean(dim=0)
    if bias in one.reply:
        errors = torch.stack([sign * o.reply[bias] for sign, o in zip(signs, seen, strict=True)])
        rows = torch.cat([rows, errors.unsqueeze(-1)], dim=-1)
        typical = torch.cat([typical, torch.ones_like(typical[:1])])
    projected: Tensor = rows @ typical / typical.square().sum()
    if bias not in one.reply:
        return projected
    longest = rows.norm(dim=-1).argmax(dim=1)
    cosine = torch.cosine_similarity(rows[torch.arange(len(rows)), longest], typical.expand(len(rows), -1))
    return projected.where(cosine.abs()[:, None] > _ALIKE, errors)


def _output_change(one: Observation) -> Tensor:
    """[classes]: how the mean outputs on random inputs change along a reply that holds nothing of the classifier.

    A gradient lowers the outputs of its labels, and about as much as the prediction's error is. The lowest is set to
    -1 / batch size, the error of a label that is there once.
    """
    model, probes = Functional(one.module), _probes(one)
    along = {name: one.reply.get(name, torch.zeros_like(tensor)) for name, tensor in one.sent.items()}
    change: Tensor = jvp(lambda params: model(params, probes).mean(dim=0), (one.sent,), (along,))[1]
    change = change - change.mean()
    return gradient_scale(one) * change / (change.min().abs().clamp_min(1e-12) * (one.batch_size or 1))


def _read(seen: Sequence[Observation], batch_size: int) -> Tensor:
    """The labels behind replies to one broadcast, [N, batch_size], with repeats.

    n_k is B (mean p_k - error_k), with p from the model's outputs on random inputs. Good before and early in training,
    when p varies little. Counts are given out one by one to the class that is owed most, so that they add up to the
    batch.
    """
    granted = [one.labels for one in seen if one.labels is not None]
    if len(granted) == len(seen):
        return torch.stack(granted)
    one, errors = seen[0], prediction_errors(seen)
    if batch_size == 1:
        return errors.argmin(dim=1, keepdim=True)
    with torch.no_grad():
        outputs = logits_of(functional_call(one.module, one.sent, (_probes(one),)))
    predictions = outputs.softmax(dim=-1).mean(dim=0)
    owed = batch_size * (predictions - errors / gradient_scale(one))
    chosen = []
    for _ in range(batch_size):
        chosen.append(owed.argmax(dim=1, keepdim=True))
        owed = owed.scatter_add(1, chosen[-1], -torch.ones_like(owed[:, :1]))
    counted = torch.cat(chosen, dim=1).sort(dim=1).values
    name = classifier(one.module, one.domain)
    frozen = not {f"{name}.weight", f"{name}.bias"} & one.reply.keys()
    if local_steps(one) in (1, None) or batch_size > _MOST or frozen:
        return counted
    return torch.stack([_search_labels(one, guess) for one, guess in zip(seen, counted, strict=True)])


def _search_labels(one: Observation, guess: Tensor) -> Tensor:
    """The labels [n] that explain the update of the classifier best, starting from a guess."""
    recipe, inputs, name = one.recipe, _probes(one)[: len(guess)], classifier(one.module, one.domain)
    assert recipe is not None
    parameter = "bias" if f"{name}.bias" in one.reply else "weight"
    wanted = one.reply[f"{name}.{parameter}"]
    model, start, key = Functional(one.module, train_mode=recipe.train_mode), one.sent, f"{name}.{parameter}"
    if sum(tensor.numel() for tensor in one.sent.values()) >= _LARGE:
        model, key = Functional(one.module.get_submodule(name)), parameter
        start = {own: one.sent[f"{name}.{own}"] for own in model.params}
        with torch.no_grad():
            inputs = representation(one.module, one.domain)(inputs, one.sent)

    def distance(labels: Tensor) -> Tensor:
        return (local_update(model, one.loss, start, inputs, labels, recipe)[key] - wanted).square().sum()

    best, lowest = guess, distance(guess)
    for _ in range(3 * len(guess)):
        candidates = _neighbors(best, one.domain.classes)
        distances = vmap(distance, chunk_size=64)(candidates)
        if not bool(distances.min() < lowest):
            break
        best, lowest = candidates[distances.argmin()], distances.min()
    return best


def _neighbors(labels: Tensor, classes: int) -> Tensor:
    """[m, n]: every way to change one label or to swap two."""
    count = len(labels)
    changed = labels.repeat(count * classes, 1)
    place = torch.arange(count, device=labels.device).repeat_interleave(classes)
    changed[torch.arange(len(changed)), place] = torch.arange(classes, device=labels.device).repeat(count)
    first, second = torch.triu_indices(count, count, 1, device=labels.device)
    swapped = labels.repeat(len(first), 1)
    rows = torch.arange(len(first))
    swapped[rows, first], swapped[rows, second] = labels[second], labels[first]
    return torch.cat([changed, swapped])


def _probes(one: Observation) -> Tensor:
    """Random inputs [n, ...] with the domain's mean and deviation."""
    drawn = one.domain.probes(_PROBES, generator(0, "label probes"))
    return drawn.to(next(iter(one.sent.values())).device)
