"""Arithmetic on named tensors. Every function returns new tensors; none edits an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradveil.core.types import Params

_STRETCH = 4096


def map_each(function: Callable[..., Tensor], tree: Params, *others: Params) -> Params:
    """Apply ``function`` to the tensors of the same name in each tree."""
    return {name: function(tensor, *(other[name] for other in others)) for name, tensor in tree.items()}


def add(a: Params, b: Params, scale: float | Tensor = 1.0) -> Params:
    """``a + scale * b``."""
    return map_each(lambda x, y: x + scale * y, a, b)


def added_at_once(a: Params, b: Params, scale: float = 1.0) -> Params:
    """The same of floating-point numbers in one call, which transforms such as ``vmap`` do not know."""
    sums = torch._foreach_add(list(a.values()), [b[name] for name in a], alpha=scale)
    return dict(zip(a, sums, strict=True))


def subtract(a: Params, b: Params) -> Params:
    return map_each(torch.sub, a, b)


def scaled(tree: Params, factor: float | Tensor) -> Params:
    return map_each(lambda x: factor * x, tree)


def dot(a: Params, b: Params) -> Tensor:
    """The inner product over all entries of all tensors, a scalar."""
    device = next(iter(a.values())).device  # a model may be spread over several
    return torch.stack([(x * b[name]).sum().to(device) for name, x in a.items()]).sum()


def norm(tree: Params) -> Tensor:
    """The l2 norm over all entries of all tensors, a scalar."""
    return dot(tree, tree).sqrt()


def exact_norms(rows: Tensor) -> Tensor:
    """The l2 norm of each row of [..., size].

    On a CPU torch adds entries up one by one, and is wrong by 2e-4 for millions of them: there it goes by stretches.
    """
    whole = rows.shape[-1] // _STRETCH * _STRETCH
    if rows.device.type != "cpu" or whole == 0:
        return _norms(rows)
    of_stretches = _norms(rows[..., :whole].reshape(*rows.shape[:-1], -1, _STRETCH))
    return _norms(torch.cat([of_stretches, _norms(rows[..., whole:])[..., None]], dim=-1))


def _norms(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return found


def detached(tree: Params) -> Params:
    return map_each(lambda x: x.detach().clone(), tree)


def moved(tree: Params, device: torch.device | str) -> Params:
    return map_each(lambda x: x.to(device), tree)


def stack(trees: Sequence[Params]) -> Params:
    """N trees of equal names and shapes as one tree of tensors [N, ...]."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def all_finite(tree: Params) -> bool:
    numbers = [tensor for tensor in tree.values() if tensor.is_floating_point() and tensor.numel()]
    if not numbers:
        return True
    largest = torch._foreach_norm(numbers, float("inf"))  # NaN and infinity pass through
    if len({(norm.device, norm.dtype) for norm in largest}) > 1:
        largest = tuple(norm.to(largest[0].device, torch.float64) for norm in largest)
    return bool(torch.stack(list(largest)).isfinite().all())  # one question to the card


def gaussian_like(tree: Params, rng: torch.Generator) -> Params:
    """Independent N(0, 1) entries in the shapes of ``tree``, drawn on the generator's device."""
    return map_each(lambda x: torch.randn(x.shape, generator=rng, device=rng.device, dtype=x.dtype).to(x.device), tree)
