"""Quantisation and top-k with error feedback: what is sent, what is kept for later, and whose memory it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import detached
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.defenses import Log, Quantise, TopK, can_remember
from gradveil.federated import Federation, make_training, run_training


def test_quantised_entries_are_signed_multiples_of_one_step() -> None:
    tensor = torch.randn(50, generator=torch.Generator().manual_seed(0))
    sent = Quantise(levels=4).transform({"x": tensor}, Stream.seeded(1), Log())["x"]
    steps = sent / (tensor.norm() / 4)
    assert torch.allclose(steps, steps.round(), atol=1e-5)
    assert ((sent == 0) | (sent.sign() == tensor.sign())).all()
    assert ((sent - tensor).abs() <= tensor.norm() / 4 + 1e-6).all()


def test_quantisation_is_right_on_average() -> None:
    tensor = torch.tensor([3.0, -4.0, 0.5, 0.0])
    draws = [Quantise(levels=2).transform({"x": tensor}, Stream.seeded(seed), Log())["x"] for seed in range(2000)]
    assert torch.allclose(torch.stack(draws).mean(dim=0), tensor, atol=0.15)
    assert len({tuple(draw.tolist()) for draw in draws}) > 1


def test_a_tensor_of_zeros_stays() -> None:
    assert Quantise().transform({"x": torch.zeros(3)}, Stream.seeded(0), Log())["x"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("levels", [0, -1, 2**17])
def test_levels_are_checked(levels: int) -> None:
    with pytest.raises(GradveilError, match="levels is from 1"):
        Quantise(levels=levels)


def test_what_was_not_sent_is_sent_later() -> None:
    """The same gradient ten times: what was sent and what waits are all of it, and with feedback all entries come."""
    module = models.build("lenet", SAMPLES.domain, seed=0)
    sent, batch = detached(dict(module.named_parameters())), SAMPLES.batch(range(2))
    defense = TopK(rate=0.75)
    client = SimulatedClient(module, recipe=Recipe(), defense=defense)
    plain = SimulatedClient(module, recipe=Recipe()).reply(sent, batch, Stream.seeded(0)).update
    replies = [client.reply(sent, batch, Stream.seeded(0)).update for _ in range(10)]
    assert can_remember(defense)
    for name, gradient in plain.items():
        total = torch.stack([reply[name] for reply in replies]).sum(dim=0) + defense._waiting[name]
        assert torch.allclose(total, 10 * gradient, rtol=1e-3, atol=1e-6)
    first = replies[0]["fc.weight"]
    assert int((first != 0).sum()) == round(0.25 * first.numel())
    assert not torch.equal(first, replies[1]["fc.weight"])


@pytest.mark.integration
def test_each_client_of_a_training_has_a_memory_of_its_own() -> None:
    fields = {
        "data": "mnist-samples", "model": "mlp", "clients": 2, "rounds": 2, "algorithm": "fedsgd", "batch_size": None,
        "defense": "topk:rate=0.9", "seed": 1,
    }  # fmt: skip
    seen = []
    federation = Federation(make_training(fields), load("mnist-samples"), on_exchange=seen.append)
    first = federation.state
    federation.round(1)
    federation.round(2)
    for client in (0, 1):
        alone = TopK(rate=0.9)
        own = SimulatedClient(federation.module, recipe=federation.case.recipe, defense=alone)
        for exchange in (one for one in seen if one.client == client):
            assert exchange.batch is not None
            expected = own.reply(exchange.sent.params, exchange.batch, Stream.seeded(0)).update
            assert all(torch.allclose(expected[name], exchange.update[name], atol=1e-6) for name in expected)
    assert len(seen) == 4
    assert federation.state is not first


@pytest.mark.integration
def test_a_resumed_training_forgets_nothing(tmp_path: Path) -> None:
    """What clients remember is in no checkpoint: the rounds before are run again, with the same outcome."""
    fields = {
        "data": "mnist-samples", "model": "mlp:hidden=8", "clients": 2, "rounds": 2, "algorithm": "fedsgd",
        "batch_size": 5, "defense": "topk:rate=0.9",
    }  # fmt: skip
    run_training(make_training(fields), tmp_path / "one")
    longer = make_training({**fields, "rounds": 3})
    resumed = run_training(longer, tmp_path / "one", resume=True)
    whole = run_training(longer, tmp_path / "two")
    assert [row["loss"] for row in resumed["rows"]] == pytest.approx([row["loss"] for row in whole["rows"]])
