"""Reading the private labels off the gradient of the classifier's last layer, before any search.

Row k of that gradient, with the bias as one more column, is the mean over the batch of (p_k - [k is the label]) h: the
prediction's error times the representation h, whose last entry is 1. The adversary has the model, so it can ask it what
h and p look like on random inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from gradveil.attacks.parts.updates import counts, local_steps
from gradveil.attacks.relabel import try_out
from gradveil.core.seeding import generator
from gradveil.models import classifier, representation
from gradveil.threat.observation import Observation

_PROBES = 64
_ALIKE = 0.3


def infer_labels(seen: Sequence[Observation], batch_size: int) -> Tensor:
    """The labels behind each reply to one broadcast, [N, batch_size]; granted ones are taken as they are."""
    granted = [one.labels for one in seen if one.labels is not None]
    if len(granted) == len(seen):
        return torch.stack(granted)
    errors = prediction_errors(seen)
    if batch_size == 1:
        return errors.argmin(dim=1, keepdim=True)
    counted = _counted(seen[0], errors, batch_size)
    if local_steps(seen[0]) in (1, None):
        return counted
    stand_ins, key = _probes(seen[0])[:batch_size], _observed_layer(seen[0])
    return torch.stack([try_out(one, counted[i], stand_ins, key) for i, one in enumerate(seen)])


def prediction_errors(seen: Sequence[Observation]) -> Tensor:
    """[N, classes]: the mean over each batch of p_k - [k is the label], up to a positive factor for one example.

    Every row is a multiple of h; its product with a typical h tells which. That averages noise over the whole row,
    where the bias alone would be one noisy number. If the rows look nothing like a typical h, the bias has to do.
    """
    one, name = seen[0], classifier(seen[0].module, seen[0].domain)
    rows = torch.stack([_sign(o) * o.reply[f"{name}.weight"] for o in seen])
    typical = _typical_representation(one)
    bias = f"{name}.bias"
    if bias in one.reply:
        errors = torch.stack([_sign(o) * o.reply[bias] for o in seen])
        rows = torch.cat([rows, errors.unsqueeze(-1)], dim=-1)
        typical = torch.cat([typical, torch.ones_like(typical[:1])])
    projected: Tensor = rows @ typical / typical.square().sum()
    if bias not in one.reply:
        return projected
    longest = rows.norm(dim=-1).argmax(dim=1)
    cosine = torch.cosine_similarity(rows[torch.arange(len(rows)), longest], typical.expand(len(rows), -1))
    return projected.where(cosine.abs()[:, None] > _ALIKE, errors)


def _counted(one: Observation, errors: Tensor, batch_size: int) -> Tensor:
    """[N, batch_size] with repeats: n_k is B (mean p_k - error_k), with p from the model's answers on random inputs.

    Good before and early in training, when p varies little. Counts are given out one by one to the class that is owed
    most, so that they add up to the batch.
    """
    predictions = _ask(one).softmax(dim=-1).mean(dim=0)
    owed = batch_size * (predictions - errors / _added_up(one))
    labels = []
    for _ in range(batch_size):
        chosen = owed.argmax(dim=1, keepdim=True)
        owed = owed.scatter_add(1, chosen, -torch.ones_like(owed[:, :1]))
        labels.append(chosen)
    return torch.cat(labels, dim=1).sort(dim=1).values


def _observed_layer(one: Observation) -> str:
    """The parameter of the classifier that shows the predictions' errors most plainly."""
    name = classifier(one.module, one.domain)
    return f"{name}.bias" if f"{name}.bias" in one.reply else f"{name}.weight"


def _sign(one: Observation) -> float:
    """A difference of parameters points against the gradient."""
    return 1.0 if one.kind == "gradient" else -1.0


def _added_up(one: Observation) -> float:
    """How many mean gradients a reply adds up to, where it is a difference of parameters."""
    recipe = one.recipe
    if one.kind == "gradient" or recipe is None:
        return 1.0
    return recipe.lr * sum(counts(recipe, local_steps(one) or 1))


def _probes(one: Observation) -> Tensor:
    """Random inputs [n, C, H, W] with the domain's mean and deviation."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (one.domain.mean, one.domain.std))
    drawn = torch.randn((_PROBES, *one.domain.shape), generator=generator(0, "label probes"))
    return (mean + std * drawn).clamp(0, 1).to(next(iter(one.sent.values())).device)


def _typical_representation(one: Observation) -> Tensor:
    with torch.no_grad():
        return representation(one.module, one.domain)(_probes(one), one.sent).mean(dim=0)


def _ask(one: Observation) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = functional_call(one.module, one.sent, (_probes(one),))
    return outputs
