"""Options from Python that a spec would refuse, and options that would protect nobody without a word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradveil
from exchanges import SAMPLES
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Params
from gradveil.defenses import DCS2, Censor, Clip, DCS2Plus, Defense, Log, Noise, Outpost, Soteria, Sparsify, Transform

WRONG: list[tuple[Callable[..., Defense], dict[str, Any]]] = [
    (Noise, {"at": "Step"}), (Sparsify, {"at": "updates"}), (Noise, {"kind": "gauss"}), (Noise, {"sigma": "1"}),
    (Clip, {"bound": 1.0, "per": "whole", "at": "step"}), (Soteria, {"score": "printed"}),
    (Censor, {"orthogonal": "example"}), (Censor, {"fallback": "Original"}), (Censor, {"norms": "hidden"}),
    (Censor, {"projection": "exactly"}), (Censor, {"source": "Public"}), (Censor, {"acceptance": "print"}),
    (Censor, {"trials": 2.5}), (Censor, {"trials": True}), (Censor, {"rounds": 2.5}), (Censor, {"layerwise": "false"}),
    (Outpost, {"first": "false"}), (Outpost, {"per": "Layer"}), (Outpost, {"threshold": "every"}),
    (Outpost, {"fisher": "output"}), (Outpost, {"phi": None}), (DCS2, {"k": 2.5}), (DCS2, {"box": "no"}),
    (DCS2, {"start": "Batch"}), (DCS2, {"combine": "mean"}), (DCS2Plus, {"strict": "no"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"), WRONG, ids=lambda value: str(value) if isinstance(value, dict) else value.__name__
)
def test_an_option_of_another_kind_is_refused(kind: Callable[..., Defense], options: dict[str, Any]) -> None:
    """Taken as it is, noise at "Step" would be added nowhere, and "false" would be true."""
    with pytest.raises(GradveilError, match=list(options)[-1] if "bound" not in options else "per"):
        kind(**options)


def test_numbers_of_numpy_and_whole_ones_are_numbers() -> None:
    for good in (Noise(sigma=1), Noise(sigma=np.float32(1)), Censor(trials=np.int64(3)), Censor(rounds=None)):
        assert isinstance(good, Defense)
    assert isinstance(DCS2(sensitive=lambda batch: batch.labels == 3), Defense)
    assert isinstance(DCS2(sensitive=torch.tensor([True])), Defense)


@dataclass(frozen=True)
class Own(Transform):
    """Somebody's own, which nothing checks when it is made."""

    at: Any = "gradient"

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return {name: torch.zeros_like(tensor) for name, tensor in tree.items()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.Sigmoid(), nn.Linear(8, 10))


def reply(defense: Defense, count: int) -> Params:
    """What a client sends that trains with it, one step."""
    client = gradveil.Client(model(), loss=nn.functional.cross_entropy, defense=defense)
    batch = SAMPLES.batch(range(count))
    client.step(batch.inputs, batch.labels)
    sent: Params = client.reply()
    return sent


def test_a_transform_that_acts_nowhere_is_refused() -> None:
    with pytest.raises(GradveilError, match="at is step or update, not gradient"):
        reply(Own(), 2)
    assert not any(tensor.any() for tensor in reply(Own(at="step"), 2).values())


@pytest.mark.parametrize(("share", "count"), [("30%", 2), ("30%", 1), ("0%", 4)])
def test_a_share_that_is_nobody_is_refused(share: str, count: int) -> None:
    """A client that protects three in ten of its examples would send both of two as they are."""
    defense = DCS2(iterations=2, sensitive=share)
    with pytest.raises(GradveilError, match=f"{share} of {count} examples is nobody"):
        reply(defense, count)


def test_a_share_of_enough_examples_protects_some() -> None:
    bare, hidden = reply(Defense(), 4), reply(DCS2(iterations=2, sensitive="30%"), 4)
    assert any(not torch.allclose(bare[name], hidden[name], rtol=1e-3) for name in bare)


def test_a_class_that_is_not_there_is_refused_by_a_client() -> None:
    with pytest.raises(GradveilError, match="no public image of class 42"):
        reply(Censor(trials=2, source="public", public_class=42), 2)
    with pytest.raises(GradveilError, match="label is below the model's 10, not 99"):
        reply(DCS2(iterations=2, sensitive="label", label=99), 2)
