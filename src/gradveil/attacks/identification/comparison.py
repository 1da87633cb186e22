"""Candidates beside what was seen: the few numbers of each tensor that every way of ranking needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.core.trees import stack
from gradveil.core.types import Params


@dataclass(frozen=True)
class Layout:
    """Which parts of an update are compared."""

    only_sent: bool = False
    """Leave out entries at which the reply is zero."""
    largest: bool = False
    """Those that are not zero are the largest of their tensor, and that is compared as well."""
    cuts: Mapping[str, list[int]] = field(default_factory=dict)
    """Tensors that are taken in pieces: how many entries each piece has."""


@dataclass(frozen=True)
class Comparison:
    """T pieces, which are whole tensors unless a layout says otherwise, of c candidates beside those of N replies."""

    names: tuple[str, ...]
    """The tensor that each piece is of."""
    products: Tensor
    """[T, c, N]: inner products of a candidate's piece with the reply's."""
    squares: Tensor
    """[T, c, 1]: the squared length of each piece of a candidate."""
    within: Tensor
    """[T, c, N]: that of the part to be compared; [T, c, 1] where it is all of it."""
    most: Tensor
    """[T, c, N]: the most that a part of so many entries could have; [T, c, 1] where it is all of them."""
    seen: Tensor
    """[T, 1, N]: the squared length of each piece of a reply."""
    sizes: Tensor
    """[T, 1, 1]: how many entries a piece has."""

    def whole(self) -> Comparison:
        """All pieces as one vector."""
        numbers = (self.products, self.squares, self.within, self.most, self.seen, self.sizes)
        return Comparison(("all",), *(part.sum(dim=0, keepdim=True) for part in numbers))


class Replies:
    """What was seen, laid out to be compared with groups of candidates.

    In double precision: the angle between the updates of like examples can be smaller than float32 resolves.
    """

    def __init__(self, replies: Sequence[Params], layout: Layout) -> None:
        self.layout = layout
        self.names, self.pieces = self._cut(stack(replies))
        self.seen = torch.stack([piece.square().sum(dim=1) for piece in self.pieces]).unsqueeze(1)
        self.sizes = torch.tensor([piece.shape[1] for piece in self.pieces]).to(self.seen).view(-1, 1, 1)

    def beside(self, updates: Params) -> Comparison:
        """The comparison with candidates whose updates are [c, ...] by name."""
        _, each = self._cut(updates)
        products = torch.stack([own @ reply.T for own, reply in zip(each, self.pieces, strict=True)])
        squares = [own.square() for own in each]
        whole = torch.stack([square.sum(dim=1) for square in squares]).unsqueeze(-1)
        within, most = whole, whole
        if self.layout.only_sent:
            sent = [(reply != 0).to(reply) for reply in self.pieces]
            within = torch.stack([square @ part.T for square, part in zip(squares, sent, strict=True)])
            if self.layout.largest:
                counts = [part.sum(dim=1).long() for part in sent]
                most = torch.stack([_largest(*pair) for pair in zip(squares, counts, strict=True)])
        return Comparison(self.names, products, whole, within, most, self.seen, self.sizes)

    def _cut(self, tree: Params) -> tuple[tuple[str, ...], list[Tensor]]:
        """Names and pieces of tensors [n, ...], each piece [n, entries]."""
        names: list[str] = []
        pieces: list[Tensor] = []
        for name, tensor in sorted(tree.items()):
            cut = torch.split(tensor.flatten(1).double(), self.layout.cuts.get(name, tensor[0].numel()), dim=1)
            names += [name] * len(cut)
            pieces += cut
        return tuple(names), pieces


def _largest(squares: Tensor, counts: Tensor) -> Tensor:
    """[c, N]: what the ``counts`` [N] largest of the entries [c, n] add up to."""
    sums = squares.sort(dim=1, descending=True).values.cumsum(dim=1)
    return torch.cat([torch.zeros_like(sums[:, :1]), sums], dim=1)[:, counts]
