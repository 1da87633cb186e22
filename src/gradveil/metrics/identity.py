"""Whose picture it is: guesses matched to private images, their rank among candidates, their labels, and intervals."""

from __future__ import annotations

import math

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch


def matched(guess: Batch, truth: Batch) -> Batch:
    """The guess in the order of the truth: a new batch; neither argument changes."""
    return guess.take(matching_order(guess, truth))


def matching_order(guess: Batch, truth: Batch) -> Tensor:
    """[n]: for each private image the position of its guess, with the least total squared error of pixels (Hungarian).

    An update does not say in what order its batch was. Guesses that are not finite are left for the places nobody else
    wants.
    """
    if guess.inputs.shape != truth.inputs.shape:
        shapes = f"{list(guess.inputs.shape)} and {list(truth.inputs.shape)}"
        raise GradveilError(f"a guess can only be matched with as many images of the same size, not {shapes}")
    left, right = (batch.inputs.flatten(1).double() for batch in (truth, guess))
    cost = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist").square().cpu()
    finite = cost[cost.isfinite()]
    worst = float(finite.max()) + 1 if len(finite) else 1.0
    _, order = linear_sum_assignment(cost.nan_to_num(nan=worst, posinf=worst).numpy())
    return torch.from_numpy(order).to(guess.inputs.device)


def ranks(distances: Tensor, truth_index: Tensor) -> Tensor:
    """The place of the true candidate, [n], by distances [n, m] from each guess to each candidate; 1 = picked first.

    Lower leaks more. Candidates that are as near as the true one count half: that is its place on average, if a draw
    tells them apart. What is no number counts as the furthest.

    >>> ranks(torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.5, 0.8]]), torch.tensor([0, 1]))
    tensor([1.0000, 1.5000], dtype=torch.float64)
    """
    distances = distances.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    own = distances.gather(1, truth_index.to(distances.device)[:, None])
    nearer, alike = (distances < own).sum(dim=1), (distances == own).sum(dim=1) - 1
    return 1 + nearer.double() + alike.double() / 2


def picks(distances: Tensor, size: int = 1) -> Tensor:
    """How likely each candidate is among the ``size`` that are named, [n, m], if a draw tells equal distances apart.

    >>> picks(torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.5, 0.8]])).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    distances = distances.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    last = distances.kthvalue(min(size, distances.shape[1]), dim=1, keepdim=True).values
    surely, alike = (distances < last), (distances == last)
    left = (size - surely.sum(dim=1, keepdim=True)).double() / alike.sum(dim=1, keepdim=True)
    return surely.double() + alike * left.clamp(max=1)


def label_accuracy(guess: Tensor, truth: Tensor) -> float:
    """The share of the label multiset of one batch that is right, whatever the order. Higher leaks more.

    >>> label_accuracy(torch.tensor([3, 3, 5, 1]), torch.tensor([3, 5, 5, 1]))
    0.75
    """
    classes = torch.unique(torch.cat([guess, truth]))
    guessed, true = ((labels[:, None] == classes).sum(dim=0) for labels in (guess, truth))
    return float(torch.minimum(guessed, true).sum()) / len(truth)


def label_chance(frequencies: Tensor, size: int, batches: Tensor | None = None) -> float:
    """The share of a batch's labels that the best guess without the update gets right, on average over batches.

    ``batches`` [n, size] are labels that were not drawn, such as those of a data set in which classes take turns: there
    a guess of all classes is always right. What this guess gets of them counts, where it is more.

    ``frequencies`` [classes] says how often each label occurs. Of ``size`` labels drawn so, N_c are of class c: a
    binomial number. A guess that holds class c g_c times gets min(g_c, N_c) of them right, on average the sum of
    P(N_c >= k) over k up to g_c. Each further copy of a class is worth less than the one before, so the best guess
    takes the ``size`` largest of all these probabilities, whichever classes they are of.

    >>> label_chance(torch.tensor([5, 3, 2]), 1), round(label_chance(torch.ones(10), 8), 3)
    (0.5, 0.57)
    >>> label_chance(torch.ones(10), 10, torch.arange(10)[None])
    1.0
    """
    from scipy.special import bdtrc  # not scipy.stats, which takes a second to load

    shares = (frequencies.double() / frequencies.sum()).numpy()[:, None]
    worth = torch.from_numpy(bdtrc(torch.arange(size).numpy(), size, shares))  # [classes, size]: P(N_c > k)
    drawn = min(1.0, float(worth.flatten().topk(size).values.sum()) / size)
    if batches is None or size == 1:
        return drawn
    guess = picks(-worth.flatten()[None], size).view_as(worth)  # of classes that are worth the same, any
    counts = torch.stack([torch.bincount(labels, minlength=len(worth)) for labels in batches.cpu()])
    right = (guess * (torch.arange(size) < counts[:, :, None])).sum(dim=(1, 2))
    return max(drawn, float(right.mean()) / size)


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's confidence interval for a share of ``successes`` out of ``n``; z = 1.96 gives 95%.

    >>> low, high = wilson(0, 10)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.278)
    """
    if n == 0:
        return 0.0, 1.0
    share, spread = successes / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)
