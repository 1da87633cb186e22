"""How many labels of a private batch an attack found."""

from __future__ import annotations

import torch
from torch import Tensor


def label_accuracy(guess: Tensor, truth: Tensor) -> float:
    """The share of the label multiset of one batch that is right, whatever the order. Higher leaks more.

    >>> label_accuracy(torch.tensor([3, 3, 5, 1]), torch.tensor([3, 5, 5, 1]))
    0.75
    """
    classes = torch.unique(torch.cat([guess, truth]))
    guessed, true = ((labels[:, None] == classes).sum(dim=0) for labels in (guess, truth))
    return float(torch.minimum(guessed, true).sum()) / len(truth)
