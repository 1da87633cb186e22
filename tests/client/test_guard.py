"""A user's own loop under a defense: ordinary PyTorch models of every awkward kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradveil
from exchanges import SAMPLES
from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.defenses import DEFENSES

BATCH = SAMPLES.batch(range(6))


def trained(model: nn.Module, defense: str | None, *, steps: int = 3, lr: float = 0.05) -> nn.Module:
    """A copy of the model after some steps of an ordinary loop."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    guard = gradveil.protect(model, optimizer, F.cross_entropy, defense=defense) if defense else None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = guard.loss if guard else F.cross_entropy
        loss(model(BATCH.inputs), BATCH.labels).backward()
        optimizer.step()
    return model


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("model", ["lenet", "convnet:width=4", "vit:depth=1,dim=24"])
def test_without_a_defense_nothing_changes(model: str) -> None:
    module = models.build(model, SAMPLES.domain, seed=0)
    assert_same(trained(module, "none"), trained(module, None))


@pytest.mark.filterwarnings("ignore:defense veil")  # six examples are few
@pytest.mark.parametrize("defense", list(DEFENSES))
def test_every_defense_steps_a_users_loop(defense: str) -> None:
    built = DEFENSES.build(f"{defense}:iterations=2" if defense.startswith("dcs2") else defense)
    module = built.on_model(models.build("lenet", SAMPLES.domain, seed=0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    before = copy.deepcopy(module.state_dict())
    with gradveil.protect(module, optimizer, F.cross_entropy, defense=built) as guard:
        guard.loss(module(BATCH.inputs), BATCH.labels).backward()
        optimizer.step()
    assert all(torch.isfinite(tensor).all() for tensor in module.state_dict().values())
    assert any(not torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("defense", ["noise", "clip:bound=0.1", "sparsify", "censor", "outpost", "clip:bound=1+noise"])
def test_the_optimiser_gets_what_a_client_would_send(defense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "secret", lambda: Stream.seeded(3))
    module = models.build("lenet", SAMPLES.domain, seed=0)
    client = SimulatedClient(module, recipe=Recipe(lr=0.05), defense=DEFENSES.build(defense))
    sent = client.reply(client.model.params, BATCH, Stream.seeded(3)).update
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    guard = gradveil.protect(module, optimizer, F.cross_entropy, defense=defense)
    guard.loss(module(BATCH.inputs), BATCH.labels).backward()
    optimizer.step()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, sent[name], msg=name)


class Awkward(nn.Module):
    """Frozen, tied, unused and bias-free layers, dropout and batch norm: what real models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(3, 4, 3, stride=2, padding=1).requires_grad_(False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.mix = nn.Linear(64, 64, bias=False)
        self.again = nn.Linear(64, 64, bias=False)
        self.again.weight = self.mix.weight
        self.unused = nn.Linear(5, 5)
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.norm(self.frozen(inputs)), 4).flatten(1)
        out: Tensor = self.head(self.again(torch.relu(self.mix(self.drop(x)))))
        return out


@pytest.mark.parametrize("defense", ["noise", "censor", "outpost", "soteria:rate=0.5", "sparsify+noise", "graddefense"])
def test_an_awkward_model_trains(defense: str) -> None:
    torch.manual_seed(0)
    model = Awkward()
    after: Any = trained(model, defense, steps=2)
    assert torch.equal(after.frozen.weight, model.frozen.weight), "frozen parameters stay"
    assert torch.equal(after.unused.weight, model.unused.weight), "what has no gradient gets no noise"
    assert after.again.weight is after.mix.weight, "tied parameters stay tied"
    assert not torch.equal(after.head.weight, model.head.weight)
    assert after.norm.num_batches_tracked == 2, "only the user's own passes count"


def test_evaluation_is_left_alone() -> None:
    module = models.build("lenet", SAMPLES.domain, seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    guard = gradveil.protect(module, optimizer, F.cross_entropy, defense="censor:trials=2")
    guard.loss(module(BATCH.inputs), BATCH.labels).backward()
    with torch.no_grad():
        guard.loss(module(BATCH.inputs[:2]), BATCH.labels[:2])
    optimizer.step()
    assert len(guard.log.values("cosine")) == 1


def test_accumulated_gradients_are_defended_with_all_their_examples() -> None:
    module = models.build("lenet", SAMPLES.domain, seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    seen: list[int] = []

    class Watching(type(DEFENSES.build("none"))):  # type: ignore[misc]
        def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]
            seen.append(len(step.batch))
            return gradient

    guard = gradveil.protect(module, optimizer, F.cross_entropy, defense=Watching())
    for part in (slice(0, 2), slice(2, 6)):
        share = len(BATCH.labels[part]) / 6
        (share * guard.loss(module(BATCH.inputs[part]), BATCH.labels[part])).backward()
    optimizer.step()
    assert seen == [6]


def test_a_closed_guard_defends_nothing_more() -> None:
    module = models.build("lenet", SAMPLES.domain, seed=0)
    plain = trained(module, None, steps=1)
    optimizer = torch.optim.SGD(module.train().parameters(), lr=0.05, momentum=0.9)
    gradveil.protect(module, optimizer, F.cross_entropy, defense="noise:sigma=10").close()
    F.cross_entropy(module(BATCH.inputs), BATCH.labels).backward()
    optimizer.step()
    assert_same(module, plain)


def test_a_loss_with_dropout_in_it_is_no_measure_for_a_defense() -> None:
    """At lr=0 no candidate lowers the loss: one that seems to was compared with a loss that dropout had raised."""
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 32 * 32, 10))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with gradveil.protect(module, optimizer, F.cross_entropy, defense="censor:lr=0,fallback=skip,trials=5") as guard:
        for _ in range(10):
            optimizer.zero_grad()
            guard.loss(module(BATCH.inputs), BATCH.labels).backward()
            optimizer.step()
    assert guard.log.means()["fallback_rate"] == 1


def test_two_runs_differ() -> None:
    one = {"w": torch.zeros(50)}
    first, second = (gradveil.defend_update(one, defense="noise") for _ in range(2))
    assert not torch.equal(first["w"], second["w"])


@pytest.mark.parametrize(
    ("defense", "model", "words"),
    [
        ("dp", "resnet18", "batch"),
        ("precode", "lenet", "before the optimizer"),
        ("noise:at=update", "lenet", r"gradveil\.Client"),
        ("censr", "lenet", "censor"),
    ],
)
def test_what_cannot_work_is_said_before_training(defense: str, model: str, words: str) -> None:
    module = models.build(model, SAMPLES.domain, seed=0)
    with pytest.raises(GradveilError, match=words):
        gradveil.protect(module, torch.optim.SGD(module.parameters()), F.cross_entropy, defense=defense)


def test_a_foreign_parameter_in_the_optimizer_is_refused() -> None:
    module = models.build("lenet", SAMPLES.domain, seed=0)
    optimizer = torch.optim.SGD([*module.parameters(), nn.Parameter(torch.zeros(1))])
    with pytest.raises(GradveilError, match="undefended"):
        gradveil.protect(module, optimizer, F.cross_entropy, defense="noise")


def test_a_loop_that_bypasses_the_guard_is_told_how_to_use_it() -> None:
    module = models.build("lenet", SAMPLES.domain, seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    gradveil.protect(module, optimizer, F.cross_entropy, defense="noise")
    F.cross_entropy(module(BATCH.inputs), BATCH.labels).backward()
    with pytest.raises(GradveilError, match=r"guard\.loss"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(GradveilError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_an_update_is_defended_by_name() -> None:
    update = {"w": torch.randn(4, 5), "b": torch.randn(4), "norm.num_batches_tracked": torch.tensor(3)}
    before = {name: tensor.clone() for name, tensor in update.items()}
    sent = gradveil.defend_update(update, defense="clip:bound=0.5,per=global+sparsify:rate=0.5")
    assert sent.keys() == update.keys()
    assert torch.equal(sent["norm.num_batches_tracked"], torch.tensor(3))
    assert torch.cat([sent["w"].flatten(), sent["b"]]).norm() <= 0.5 + 1e-6
    assert (sent["w"] == 0).sum() == 10
    assert all(torch.equal(update[name], before[name]) for name in update), "the update itself is not edited"


def test_a_defense_that_needs_data_is_not_for_a_bare_update() -> None:
    with pytest.raises(GradveilError, match=r"gradveil\.protect"):
        gradveil.defend_update({"w": torch.zeros(2)}, defense="censor")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("defense", [name for name in DEFENSES if not name.startswith("precode")])
def test_a_model_on_two_devices_trains(defense: str) -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1).cuda()
            self.head = nn.Linear(64, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            x = F.adaptive_avg_pool2d(torch.sigmoid(self.first(inputs.cuda())), 4).flatten(1)
            out: Tensor = self.head(x.cpu())
            return out

    model = Spread()
    spec = f"{defense}:iterations=2" if defense.startswith("dcs2") else defense
    after = trained(model, spec, steps=2)
    assert after.first.weight.is_cuda
    assert not after.head.weight.is_cuda
    assert all(torch.isfinite(p).all() for p in after.parameters())
