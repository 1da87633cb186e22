"""Identification: which rank the private image takes when a reconstruction is used to pick it out of candidates."""

from __future__ import annotations

import math

from torch import Tensor


def ranks(distances: Tensor, truth_index: Tensor) -> Tensor:
    """The place of the true candidate, [n], by distances [n, m] from each guess to each candidate; 1 = picked first.

    Lower leaks more. Ties count against the attacker: candidates that are as near as the true one stand before it.

    >>> import torch
    >>> ranks(torch.tensor([[0.1, 0.7, 0.9], [0.5, 0.5, 0.8]]), torch.tensor([0, 1]))
    tensor([1, 2])
    """
    own = distances.gather(1, truth_index.to(distances.device)[:, None])
    return (distances <= own).sum(dim=1)


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
