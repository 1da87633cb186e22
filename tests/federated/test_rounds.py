"""Rounds against loops written with plain PyTorch, clients side by side, defenses, and replies that are dropped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gradveil import models
from gradveil.client import Gradient, Request, SimulatedClient, StatisticsAfter, cross_entropy
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import scaled
from gradveil.core.types import Batch, Params, Recipe
from gradveil.data import ImageSet, load
from gradveil.defenses import DEFENSES, Defense
from gradveil.domains import Images
from gradveil.engine.clients import batched
from gradveil.federated import Federation, Runner, Training, participants, why_unusable
from gradveil.models import Functional

SAMPLES = load("mnist-samples")
SMALL = "mlp:hidden=16,depth=1"
SMOOTH = f"{SMALL},activation=sigmoid"  # without kinks, where rounding could become a difference


def case(**fields: Any) -> Training:
    usual: dict[str, Any] = {"data": "mnist-samples", "model": SMALL, "clients": 4, "rounds": 3}
    return Training(**(usual | fields))


def trained(training: Training, data: ImageSet = SAMPLES, **given: Any) -> Federation:
    federation = Federation(training, data, **given)
    for number in range(1, training.rounds + 1):
        federation.round(number)
    return federation


def order_of(federation: Federation, client: int, number: int) -> Batch:
    """The examples of a client in the order of a round, which the seed decides."""
    share = federation.shares[client]
    drawn = torch.randperm(len(share), generator=generator(federation.case.seed, "federated", "order", number, client))
    return SAMPLES.batch(share[drawn])


def by_hand(federation: Federation) -> nn.Module:
    """The same training with nothing but torch.nn and torch.optim."""
    case = federation.case
    server = models.build(case.model, SAMPLES.domain, seed=case.seed).train(case.train_mode)
    velocity: Params = {}
    for number in range(1, case.rounds + 1):
        chosen = participants(case.clients, case.per_round, seed=case.seed, round_number=number)
        ends, weights = [], []
        for client in chosen:
            local, batch = copy.deepcopy(server), order_of(federation, client, number)
            optimizer = torch.optim.SGD(
                local.parameters(), lr=case.lr, momentum=case.momentum, weight_decay=case.weight_decay
            )
            if case.algorithm == "fedsgd":
                batch = batch.take(slice(case.batch_size))
            size = case.batch_size or len(batch)
            for _ in range(case.epochs):
                for start in range(0, len(batch), size):
                    part = batch.take(slice(start, start + size))
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(local(part.inputs), part.labels).backward()
                    optimizer.step()
            ends.append({name: tensor.detach() for name, tensor in local.named_parameters()})
            weights.append(len(batch))
        with torch.no_grad():
            for name, parameter in server.named_parameters():
                mean = sum(w * (end[name] - parameter) for w, end in zip(weights, ends, strict=True)) / sum(weights)
                velocity[name] = mean + case.server_momentum * velocity.get(name, torch.zeros(()))
                parameter.add_(case.server_lr * velocity[name])
    return server


@pytest.mark.parametrize(
    "training",
    [
        case(model=SMOOTH, epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.01),
        case(
            model=SMOOTH, partition="dirichlet:alpha=0.3", per_round=2, batch_size=5, server_lr=0.7, server_momentum=0.5
        ),
        case(model=SMOOTH, algorithm="fedsgd", batch_size=8, lr=0.2),
        case(model=SMOOTH, algorithm="fedsgd", batch_size=None, partition="shards", server_momentum=0.9),
    ],
    ids=["fedavg", "fedavg, 2 of 4", "fedsgd", "fedsgd, all examples"],
)
def test_training_is_the_loop_one_would_write_by_hand(training: Training) -> None:
    federation = trained(training)
    for name, parameter in by_hand(federation).named_parameters():
        torch.testing.assert_close(federation.state.params[name], parameter.detach(), atol=1e-6, rtol=1e-5)


def test_fedsgd_is_fedavg_with_one_step_over_everything() -> None:
    one, other = (trained(case(model=SMOOTH, algorithm=kind, batch_size=None, lr=0.3)) for kind in ("fedsgd", "fedavg"))
    for name, tensor in one.state.params.items():
        torch.testing.assert_close(tensor, other.state.params[name], atol=1e-6, rtol=1e-5)


QUICK = {"dcs2": "dcs2:iterations=2", "dcs2plus": "dcs2plus:iterations=2", "censor": "censor:trials=2"}


@pytest.mark.parametrize("spec", [QUICK.get(name, name) for name in DEFENSES] + ["clip:bound=1+noise:sigma=0.01"])
def test_every_defense_trains_and_side_by_side_changes_nothing(spec: str) -> None:
    """On the GPU clients go side by side: the same up to rounding, whatever a defense draws or decides."""
    training = case(model=SMOOTH, defense=spec, rounds=2, lr=0.01, batch_size=10, partition="dirichlet:alpha=2")
    some = SAMPLES.subset(range(50))  # no client holds the others, which are public
    alone = trained(training, some)
    together = trained(Training(**{**training.as_json(), "side_by_side": "true"}), some)
    assert alone.state.params.keys() == together.state.params.keys()
    for name, tensor in alone.state.params.items():
        assert torch.isfinite(tensor).all()
        torch.testing.assert_close(together.state.params[name], tensor, atol=1e-5, rtol=1e-4)
    assert not torch.equal(alone.state.params[name], dict(alone.module.named_parameters())[name])


def test_batched_gradients_are_those_of_each_client() -> None:
    """In double precision, with batch norm in train mode."""
    batch = SAMPLES.batch(torch.arange(4))
    model = Functional(models.build("convnet:width=2", SAMPLES.domain, seed=0).double(), train_mode=True)
    gradient_of = Gradient(model, cross_entropy)
    requests = [
        Request(gradient_of, (scaled(model.params, factor), {}, factor * batch.inputs.double(), batch.labels))
        for factor in (1.0, 0.5, 2.0)
    ]
    for one, (gradient, value) in zip(requests, batched(requests), strict=True):
        alone, loss = one.evaluate()
        torch.testing.assert_close(value, loss)
        for name, tensor in alone.items():
            torch.testing.assert_close(gradient[name], tensor)


class Stubborn(nn.Module):
    """Looks at a number in its forward pass, which no batched call allows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs.flatten(1))
        return outputs if outputs.sum().item() > -1e9 else -outputs


def stubborn(domain: Images) -> nn.Module:  # noqa: ARG001
    return Stubborn()


def test_a_model_that_cannot_be_batched_goes_one_after_another_or_says_so() -> None:
    training = case(model="federated.test_rounds:stubborn", rounds=1)
    federation = Federation(training, SAMPLES)
    federation._runner = Runner("auto", "cuda")
    federation._runner._together = batched
    assert not federation.round(1).side_by_side
    torch.testing.assert_close(federation.state.params, trained(training).state.params)
    with pytest.raises(GradveilError, match=r"cannot go side by side.*side_by_side=false"):
        trained(Training(**{**training.as_json(), "side_by_side": "true"}))


def test_running_statistics_are_those_of_a_plain_training_step() -> None:
    """One client, one gradient: what PyTorch's own forward pass in train mode leaves in the buffers."""
    training = case(model="convnet:width=2", clients=1, rounds=1, algorithm="fedsgd", batch_size=16)
    federation = trained(training)
    plain = models.build(training.model, SAMPLES.domain, seed=0).train()
    plain(order_of(federation, 0, 1).inputs[:16])
    expected = {name: buffer for name, buffer in plain.named_buffers() if name in federation.state.buffers}
    assert len(expected) == 9 * 3
    for name, buffer in expected.items():
        torch.testing.assert_close(federation.state.buffers[name], buffer)


def test_running_statistics_are_of_the_examples_as_the_defense_left_them() -> None:
    """ATS trains on transformed images; statistics of the others would give away what it hides."""
    training = case(model="convnet:width=2", clients=1, rounds=1, algorithm="fedsgd", batch_size=16, defense="ats")
    federation = Federation(training, SAMPLES)
    batch, _ = federation.examples(0, 1)
    rng = Stream.seeded(training.seed, "federated", "defense", 1, 0)
    seen = DEFENSES.build("ats").on_inputs(batch.inputs, rng)
    assert not torch.equal(seen, batch.inputs)
    federation.round(1)
    plain = models.build(training.model, SAMPLES.domain, seed=0).train()
    plain(seen)
    for name, buffer in plain.named_buffers():
        if name in federation.state.buffers:
            torch.testing.assert_close(federation.state.buffers[name], buffer)


@pytest.mark.integration
@pytest.mark.parametrize("defense", ["none", "noise:sigma=100", "censor:norms=public,trials=2"])
def test_running_statistics_name_the_image_whatever_the_defense(defense: str) -> None:
    """What docs/federated.md warns of: the mean and spread behind the first layer are those of one image."""
    training = case(model="convnet:width=8", clients=20, algorithm="fedsgd", batch_size=1, defense=defense)
    train = SAMPLES.subset(range(40))  # leaves some that no client holds, to be public
    federation, mean = Federation(training, train), "body.bn0.running_mean"
    statistics, sent = StatisticsAfter(federation.module), federation.state
    candidates = [
        statistics((sent.params, sent.buffers, SAMPLES.batch([place]).inputs))[mean] for place in range(len(SAMPLES))
    ]
    for client in range(20):
        reply = federation.start(client, 1, broadcasts=1).finish()
        _, index = federation.examples(client, 1)
        assert int((torch.stack(candidates) - reply.buffers[mean]).norm(dim=1).argmin()) == int(index)


def test_a_batch_norm_over_single_values_drops_one_reply_with_the_reason() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    for defense in ("dcs2:iterations=1", "outpost:fisher=example"):
        client = SimulatedClient(module, recipe=Recipe(train_mode=True), defense=DEFENSES.build(defense))
        with pytest.raises(GradveilError, match="no single values"):
            client.reply(client.model.params, SAMPLES.batch(range(4)), Stream.seeded(0))
    for defense in ("soteria", "graddefense", "censor"):
        client = SimulatedClient(module, recipe=Recipe(train_mode=True), defense=DEFENSES.build(defense))
        client.reply(client.model.params, SAMPLES.batch(range(4)), Stream.seeded(0))


@pytest.mark.parametrize("way", ["false", "true"])
def test_a_client_whose_step_cannot_be_computed_is_dropped_and_the_others_go_on(way: str) -> None:
    """Batch norm cannot train on the one example of the last batch."""
    training = case(model="federated.test_rounds:with_batch_norm", clients=4, rounds=1, side_by_side=way)
    federation = Federation(training, SAMPLES)
    federation.shares[2] = federation.shares[2][:1]
    done = federation.round(1)
    assert list(done.dropped) == [2]
    assert "no single values" in done.dropped[2]
    assert done.side_by_side == (way == "true")


def with_batch_norm(domain: Images) -> nn.Module:  # noqa: ARG001
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))


def test_who_took_part_before_is_counted_once_for_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, drawn = Federation(case(per_round=2, rounds=20), SAMPLES), []
    draw = federation.participants
    monkeypatch.setattr(federation, "participants", lambda number: drawn.append(number) or draw(number))  # type: ignore[func-returns-value]
    for number in range(1, 21):
        federation.round(number)
    assert len(drawn) < 2 * 20
    met = [client for number in range(1, 20) for client in draw(number)]
    assert [federation.turns_before(20)[client] for client in range(4)] == [met.count(client) for client in range(4)]
    assert sum(federation.turns_before(3).values()) == 2 * 2, "a round may come again"


def test_eval_mode_leaves_running_statistics_alone() -> None:
    federation = trained(case(model="convnet:width=2", clients=2, rounds=1, train_mode=False))
    for name, buffer in federation.module.named_buffers():
        assert name not in federation.state.buffers or torch.equal(federation.state.buffers[name], buffer)


def test_censor_counts_rounds_of_the_federation_where_no_server_says_the_number() -> None:
    """With rounds=2 it is active in the first two, whoever takes part; a client that is told the number counts too."""
    federation = Federation(case(defense="censor:trials=2,rounds=2", per_round=2), SAMPLES)
    active = [bool(federation.round(number).log.values("fallback_rate")) for number in range(1, 5)]
    assert active == [True, True, False, False]
    late = federation.start(0, 4, broadcasts=1).finish()
    assert late.log.values("fallback_rate"), "its first answer, however late a server says that it is"


class Broken(Defense):
    """Sends NaN for a batch without any digit 0."""

    def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]
        bad = not bool((step.batch.labels == 0).any())
        return {name: tensor * float("nan") if bad else tensor for name, tensor in gradient.items()}


@pytest.mark.parametrize("way", ["false", "true"])
def test_replies_that_cannot_be_used_are_dropped_and_counted(way: str) -> None:
    federation = Federation(
        case(partition="shards:each=1", clients=10, algorithm="fedsgd", side_by_side=way), SAMPLES, defense=Broken()
    )
    with_zero = [n for n, share in enumerate(federation.shares) if bool((SAMPLES.labels[share] == 0).any())]
    done = federation.round(1)
    assert sorted(done.dropped) == [client for client in range(10) if client not in with_zero]
    assert "look at the inputs and the defense" in next(iter(done.dropped.values()))
    assert all(torch.isfinite(tensor).all() for tensor in federation.state.params.values())
    assert done.bytes_up == len(with_zero) * done.bytes_down // 10


def test_a_round_without_a_usable_reply_ends_the_training() -> None:
    with pytest.raises(GradveilError, match="round 1: no reply could be used; client 0: the local run diverged"):
        trained(case(lr=1e30, epochs=5))


def test_the_server_judges_shapes_and_numbers() -> None:
    like = {"w": torch.zeros(2), "b": torch.zeros(1)}
    assert why_unusable({"w": torch.ones(2), "b": torch.ones(1)}, like) is None
    assert "'w'" in str(why_unusable({"w": torch.ones(3), "b": torch.ones(1)}, like))
    assert "'b'" in str(why_unusable({"w": torch.ones(2)}, like))
    assert "'x'" in str(why_unusable({**like, "x": torch.ones(2)}, like))
    assert "NaN" in str(why_unusable({"w": torch.tensor([1.0, float("nan")]), "b": torch.ones(1)}, like))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clients": 0}, "clients is a whole number"),
        ({"per_round": 5}, "5 clients per round"),
        ({"algorithm": "fedprox"}, "fedavg, fedsgd"),
        ({"algorithm": "fedsgd", "epochs": 2}, "no local steps"),
        ({"server_momentum": 1.0}, "server_momentum"),
        ({"lr": -1.0}, "lr"),
        ({"defense": "nois"}, "noise"),
        ({"side_by_side": "maybe"}, "auto, true, false"),
        ({"tap": "0@1"}, "tap is a list"),
    ],
)
def test_what_cannot_be_trained_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(GradveilError, match=words):
        case(**fields)
