"""Arithmetic on named tensors. Every function returns new tensors; none edits an argument."""

from __future__ import annotations

from collections import defaultdict
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
    """The names of ``others`` whose tensors differ bit for bit: NaN equals itself, and 0 is not -0."""
    odd, alike = [], defaultdict[tuple[torch.device, torch.dtype], list[str]](list)
    for name, other in others.items():
        one = trees.get(name)
        if one is None or (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            odd.append(name)
        else:
            alike[other.device, other.dtype].append(name)
    for (device, _), names in alike.items():
        ones, expected = [cast(Tensor, trees[name]).detach() for name in names], [others[name] for name in names]
        # a GPU joins and compares all tensors before the host has started a kernel for each of them
        join = torch._C._nn.flatten_dense_tensors
        if device.type == "cpu" or not _equal(join(ones), join(expected)):
            odd += [n for n, one, other in zip(names, ones, expected, strict=True) if not _equal(one, other)]
    return odd


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers by which two lists of tensors are told apart without a copy.

    On a CPU the sum of the bits of each tensor. A GPU adds up all of one type in one go, each entry with a weight.
    """
    sums, alike = [], defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for tensor in tensors:
        if tensor.device.type == "cpu":
            sums.append(bits_of(tensor).sum())
        else:
            alike[tensor.device, tensor.dtype].append(tensor.detach())
    for group in alike.values():
        bits = bits_of(torch._C._nn.flatten_dense_tensors(group)).flatten()
        sums.append((bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum())
    return [int(total) for total in sums]


def detached(tree: Params) -> Params:
    """Copies that no graph knows, in one call: a GPU waits for a host that starts a kernel for each tensor."""
    copies = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in tree.items()}
    if copies:
        with torch.no_grad():
            torch._foreach_copy_(list(copies.values()), list(tree.values()))
    return copies


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
