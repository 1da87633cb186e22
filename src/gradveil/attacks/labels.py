"""Reading the private labels off the gradient of the classifier's last layer, before any search."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.models.structure import classifier
from gradveil.threat.observation import Observation

_PROBES = 64


def infer_labels(seen: Sequence[Observation], batch_size: int) -> Tensor:
    """The labels behind each reply to one broadcast, [N, batch_size]; granted ones are taken as they are."""
    granted = [one.labels for one in seen if one.labels is not None]
    if len(granted) == len(seen):
        return torch.stack(granted)
    name = classifier(seen[0].module, seen[0].domain)
    return _one_label(seen, name) if batch_size == 1 else _label_counts(seen, name, batch_size)


def _one_label(seen: Sequence[Observation], name: str) -> Tensor:
    """One example: row c of the last layer's gradient is (p_c - [c = y]) h, so the longest row is that of the label.

    The factors sum to zero and only the label's is negative, so it equals the sum of all others in size. Taking the
    length over the whole row rather than its sum needs no sign of h and averages noise out.
    """
    rows = _stacked(seen, name, "weight").flatten(2)
    if f"{name}.bias" in seen[0].reply:
        rows = torch.cat([rows, _stacked(seen, name, "bias").unsqueeze(-1)], dim=-1)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return lengths.argmax(dim=1, keepdim=True)


def _label_counts(seen: Sequence[Observation], name: str, batch_size: int) -> Tensor:
    """A batch: the bias gradient of class c is mean p_c - n_c / B, and p can be guessed by asking the model.

    The guess is the model's mean prediction on random inputs, good before and early in training. Counts are given out
    one by one to the class that is owed most, so that they add up to the batch.
    """
    if f"{name}.bias" not in seen[0].reply:
        raise GradveilError(
            f"labels of a batch are read off the bias of {name!r}, which has none: grant them with --threat C+labels"
        )
    bias = _stacked(seen, name, "bias")
    owed = batch_size * (_mean_prediction(seen[0]) - bias * _gradient_scale(seen[0], bias))
    labels = []
    for _ in range(batch_size):
        chosen = owed.argmax(dim=1, keepdim=True)
        owed = owed.scatter_add(1, chosen, -torch.ones_like(owed[:, :1]))
        labels.append(chosen)
    return torch.cat(labels, dim=1).sort(dim=1).values


def _stacked(seen: Sequence[Observation], name: str, part: str) -> Tensor:
    return torch.stack([one.reply[f"{name}.{part}"] for one in seen])


def _gradient_scale(one: Observation, bias: Tensor) -> Tensor | float:
    """What turns the reply into a mean gradient: its sign and step size where the client sent a difference."""
    if one.kind == "gradient":
        return 1.0
    if one.recipe is not None and one.recipe.batch_size is not None and one.batch_size is not None:
        steps = one.recipe.epochs * -(-one.batch_size // one.recipe.batch_size)
    else:
        steps = one.recipe.epochs if one.recipe is not None else 1
    lr = one.recipe.lr if one.recipe is not None else 1.0
    return torch.full_like(bias[:, :1], -1.0 / (lr * steps))


def _mean_prediction(one: Observation) -> Tensor:
    """[classes]: what the broadcast model says of inputs that are pure noise around the domain's mean."""
    device = next(iter(one.sent.values())).device
    rng = generator(0, "label probes")
    mean = torch.tensor(one.domain.mean).view(-1, 1, 1)
    std = torch.tensor(one.domain.std).view(-1, 1, 1)
    probes = (mean + std * torch.randn((_PROBES, *one.domain.shape), generator=rng)).clamp(0, 1).to(device)
    return _predict(one.module, one, probes).softmax(dim=-1).mean(dim=0)


def _predict(module: nn.Module, one: Observation, probes: Tensor) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = functional_call(module, one.sent, (probes,))
    return outputs
