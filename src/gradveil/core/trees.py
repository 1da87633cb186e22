"""Arithmetic on named tensors. Every function returns new tensors; none edits an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from gradveil.core.types import Params

_STRETCH = 4096
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def is_dense(tensor: object) -> bool:
    """Whether this is a dense tensor of real numbers of 16 bits or more: what can be compared and defended."""
    real = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return isinstance(tensor, Tensor) and not tensor.is_meta and tensor.dtype in real and tensor.layout == torch.strided


def is_plain(tensor: object) -> bool:
    """The same, and all of its numbers are finite."""
    return is_dense(tensor) and all_finite({"": cast(Tensor, tensor)})


def bits_of(tensor: Tensor) -> Tensor:
    """The same bits as whole numbers."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(_WHOLE[plain.element_size()])


def differing(trees: Mapping[str, Tensor | None], others: Params) -> list[str]:
    """The names of ``others`` whose tensors differ bit for bit: NaN equals itself, and 0 is not -0.

    A GPU is asked once for all of them.
    """
    alike: Params = {}
    for name, other in others.items():
        one = trees.get(name)
        if one is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device):
            alike[name] = one
    odd = [name for name in others if name not in alike]
    pairs = {name: (bits_of(one), bits_of(others[name])) for name, one in alike.items()}
    there = [name for name, (one, _) in pairs.items() if one.device.type != "cpu" and one.numel()]
    odd += [name for name, (one, other) in pairs.items() if name not in there and not torch.equal(one, other)]
    for device in {pairs[name][0].device for name in there}:
        names = [name for name in there if pairs[name][0].device == device]
        flags = torch.stack([torch.ne(*pairs[name]).any() for name in names]).tolist()
        odd += [name for name, flag in zip(names, flags, strict=True) if flag]
    return odd


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of the bits of each, by which two states are told apart without a copy. A GPU is asked once."""
    if not tensors:
        return []
    sums = [bits_of(tensor).sum() for tensor in tensors]
    together = len({total.device for total in sums}) == 1
    return torch.stack(sums).tolist() if together else [int(total) for total in sums]


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
