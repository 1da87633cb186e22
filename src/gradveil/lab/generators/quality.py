"""How well drawn images cover real ones: precision, recall and Fréchet distance between two sets of embeddings.

Precision asks whether a draw could be real, recall whether a real image could be drawn (Kynkäänniemi et al., NeurIPS
2019). The Fréchet distance (Heusel et al., NeurIPS 2017) compares two normal distributions fitted to the sets, and is
only comparable between figures from the same embedding and as many points.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError

_ROWS_AT_ONCE = 1024


def precision_recall(real: Tensor, drawn: Tensor, *, k: int = 3) -> tuple[float, float]:
    """Share of drawn points [m, d] in the manifold of the real ones [n, d], and the other way round.

    A manifold is a ball around each point that reaches to its k-th nearest neighbor in the same set.

    >>> line = torch.arange(4.0)[:, None]
    >>> precision_recall(line, torch.tensor([[0.5], [1.5], [9.0], [99.0]]), k=1)
    (0.5, 1.0)
    """
    if real.dim() != 2 or drawn.dim() != 2 or real.shape[1] != drawn.shape[1]:
        raise GradveilError("embeddings are [n, d] and [m, d] of one d")
    if not 1 <= k < min(len(real), len(drawn)):
        raise GradveilError(f"k is at least 1 and below the number of points, not {k}")
    return _covered(drawn, real, k), _covered(real, drawn, k)


def frechet(a: Tensor, b: Tensor) -> float:
    """Fréchet distance between normal distributions fitted to two sets of points, [n, d] and [m, d].

    >>> frechet(torch.tensor([[0.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
    9.0
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise GradveilError("embeddings are [n, d] and [m, d] of one d, with two points or more each")
    a, b = a.double(), b.double()
    first, second = a.T.cov().view(a.shape[1], -1), b.T.cov().view(b.shape[1], -1)
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # tr (first second)^1/2 by the symmetric matrix that has the same eigenvalues
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    apart = (a.mean(dim=0) - b.mean(dim=0)).square().sum()
    return max(0.0, float(apart + first.trace() + second.trace() - 2 * shared))


def _covered(points: Tensor, manifold: Tensor, k: int) -> float:
    """Share of points within the ball of at least one point of the manifold."""
    radii = torch.cat(
        # The nearest of all is the point itself.
        [_distances(rows, manifold).kthvalue(k + 1, dim=1).values for rows in torch.split(manifold, _ROWS_AT_ONCE)]
    )
    inside = [(_distances(rows, manifold) <= radii).any(dim=1) for rows in torch.split(points, _ROWS_AT_ONCE)]
    return float(torch.cat(inside).double().mean())


def _distances(a: Tensor, b: Tensor) -> Tensor:
    # Not by the matrix product, whose rounding can put equal points apart.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
