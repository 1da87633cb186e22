"""Where the private examples stand in the lists of attacks that rank candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks import Reconstruction
from gradveil.data import ImageSet
from gradveil.metrics import ranks


def ranked(found: Sequence[Reconstruction], index: Tensor, granted: ImageSet | None) -> dict[str, Any]:
    """Fields of a row: how many candidates were ranked, the rank of each private example, and the share ranked first.

    In a batch of B, the first B ranks count as first. ``index`` [n] says where the private examples stand among the
    candidates that the threat model ``granted``. Nothing is said of attacks that rank none, or other candidates.
    """
    scores = [one.scores for one in found if one.scores is not None]
    if not scores or granted is None or any(one.candidates != granted.name for one in found):
        return {}
    size = len(index) // len(found)
    table = torch.stack(scores).repeat_interleave(size, dim=0)
    places = ranks(table, index)
    first = float((places <= size).double().mean())
    return {"candidates": table.shape[1], "ranks": places.tolist(), "ranked_first": first}
