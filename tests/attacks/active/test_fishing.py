"""Fishing: of a batch of 128 one example's gradient stands alone after at most ten questions."""

from __future__ import annotations

import pytest
import torch

from exchanges import FEDSGD, SAMPLES, observed, private_batches
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.active.fishing import ClientReplies, Fishing, Gate, raised
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import dot, norm, subtract
from gradveil.core.types import Batch, Params, Recipe
from gradveil.threat import Observation
from interrogation import interrogated

CAT = 3
QUICK = "lenet:init=wide"


def batch_with(cats: int, size: int = 128) -> Batch:
    """So many cats first, and others: the samples and their mirror images."""
    samples = SAMPLES.batch(range(100))
    inputs, labels = torch.cat([samples.inputs, samples.inputs.flip(-1)]), samples.labels.repeat(2)
    own, others = torch.nonzero(labels[:100] == CAT).flatten(), torch.nonzero(labels != CAT).flatten()
    chosen = torch.cat([own[:cats], others[torch.randperm(len(others), generator=generator(0, "others"))]])[:size]
    return Batch(inputs[chosen], labels[chosen])


def fishing(spec: str = "fishing", budget: Budget = Budget(1, 1)) -> Fishing:  # noqa: B008
    attack = ATTACKS.build(spec, budget)
    assert isinstance(attack, Fishing)
    return attack


def asked(seen: Observation, attack: Fishing) -> ClientReplies:
    return ClientReplies([*seen.earlier, seen], attack.target)


def alone(attack: Fishing, seen: Observation, batch: Batch, recipe: Recipe = FEDSGD) -> list[Params]:
    """What each example alone, called the target, would reply to the question at which a gradient was isolated."""
    at = attack.isolated(seen)
    client, label = SimulatedClient(at.module, recipe=recipe), torch.tensor([asked(seen, attack).target])
    return [
        client.reply(at.sent, Batch(image, label), Stream.seeded(0, "none")).update for image in batch.inputs.split(1)
    ]


def cosines(attack: Fishing, seen: Observation, batch: Batch, recipe: Recipe = FEDSGD) -> torch.Tensor:
    """[n]: of the isolated gradient with that of each example."""
    found = attack.isolated(seen).reply
    return torch.stack([dot(found, own) / (norm(found) * norm(own)) for own in alone(attack, seen, batch, recipe)])


def distances(attack: Fishing, seen: Observation, batch: Batch) -> torch.Tensor:
    """[n]: of the isolated gradient from that of each example, as a share of the latter's length."""
    found = attack.isolated(seen).reply
    return torch.stack([norm(subtract(found, own)) / norm(own) for own in alone(attack, seen, batch)])


def test_one_of_its_class_stands_alone_after_two_questions() -> None:
    attack, batch = fishing(), batch_with(1)
    seen = interrogated(attack, batch, model=QUICK)
    assert seen.crafted == ("fc.weight", "fc.bias")
    assert len(asked(seen, attack)) == 2
    assert asked(seen, attack).target == CAT, "the rarest class"
    assert torch.equal(asked(seen, attack).counts, batch.labels.bincount())
    far = distances(attack, seen, batch)
    assert far[0] < 0.001
    assert far[1:].min() > 0.05


@pytest.mark.parametrize("cats", [2, 5])
def test_one_of_several_stands_alone_after_at_most_ten_questions(cats: int) -> None:
    attack, batch = fishing("fishing:target=3"), batch_with(cats)
    seen = interrogated(attack, batch, model=QUICK)
    assert 4 <= len(asked(seen, attack)) <= 10
    far = distances(attack, seen, batch)
    assert far.min() < 0.01
    assert far.sort().values[1] > 0.05, "one example, and only that one"
    assert int(batch.labels[far.argmin()]) == CAT


def test_a_batch_of_one_class_is_fished_too() -> None:
    samples = SAMPLES.batch(range(100))
    batch = samples.take(samples.labels == CAT)
    attack = fishing()
    far = distances(attack, interrogated(attack, batch, model=QUICK), batch).sort().values
    assert far[0] < 0.01 < 0.05 < far[1]


@pytest.mark.parametrize("model", [QUICK, "lenet", "mlp", "vit:depth=1,dim=24"])
@pytest.mark.parametrize("size", [2, 4])
def test_so_are_few_of_one_class(model: str, size: int) -> None:
    """The means of class and batch differ by rounding: along that, all levels lie beyond the closed gate."""
    samples = SAMPLES.batch(range(100))
    batch = samples.take(samples.labels == 0).take(slice(size))
    attack = fishing()
    seen = interrogated(attack, batch, model=model)
    assert len(asked(seen, attack)) < 10
    assert distances(attack, seen, batch).min() < 0.01


def test_a_gate_that_caught_nobody_is_not_inverted(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = fishing("fishing:target=3")
    seen = interrogated(attack, batch_with(2, size=16), model=QUICK)
    monkeypatch.setattr(Fishing, "_gates", lambda *_: [Gate(1.0, 0.0, 1.0)])
    expected = asked(seen, attack).of_class()[1]
    for name, tensor in attack.isolated(seen).reply.items():
        assert torch.equal(tensor, expected[name])


def test_several_of_a_class_are_mixed_without_the_feature_strategy() -> None:
    attack, batch = fishing("fishing:target=3,strategy=class"), batch_with(5)
    seen = interrogated(attack, batch, model=QUICK)
    assert len(asked(seen, attack)) == 2
    assert distances(attack, seen, batch).min() > 0.05


def test_it_never_asks_more_than_it_may() -> None:
    attack = fishing("fishing:target=3,queries=4,strategy=feature")
    for defense in ("none", "noise:sigma=0.1"):
        assert len(asked(interrogated(attack, batch_with(8), model=QUICK, defense=defense), attack)) == 4


def test_the_cut_rises_to_the_mean_of_what_it_caught_and_back_where_nothing_is_left() -> None:
    gates: list[Gate] = []
    for cut, above, level in ((1.0, 5.0, 3.0), (3.0, 0.2, 3.1), (2.0, 2.0, 3.2), (2.5, 3.0, 2.8)):
        assert raised(gates) == cut
        gates.append(Gate(cut, above, level))
    assert raised(gates) == 2.8


def test_two_examples_that_half_open_a_gate_are_not_one() -> None:
    attack = fishing()
    assert attack._single(Gate(1.0, 1.0, 1.1))
    assert not attack._single(Gate(1.0, 1.0, 1.0001))
    assert not attack._single(Gate(1.0, 1.3, 1.1))


def test_batch_norm_in_train_mode_mixes_the_batch() -> None:
    """OUTPOST's paper found the same: the attack wants clients in eval mode."""
    attack, batch = fishing("fishing:target=3"), batch_with(1)
    alike = []
    for recipe in (FEDSGD, Recipe(train_mode=True)):
        seen = interrogated(attack, batch, model="convnet:width=4", recipe=recipe)
        alike.append(float(cosines(attack, seen, batch.take(slice(0, 1)), recipe)[0]))
    assert alike[0] > 0.999
    assert alike[1] < 0.5


@pytest.mark.parametrize(
    ("defense", "least", "most"),
    [("dp", -0.1, 0.1), ("dp:sigma=0", 0.999, 1.001), ("noise:sigma=0.01", 0.999, 1.001), ("outpost", 0.8, 0.95)],
)
def test_what_is_left_under_a_defense(defense: str, least: float, most: float) -> None:
    """A boosted row drowns noise of a fixed size; DP-SGD clips what was boosted, and then its noise holds."""
    attack, batch = fishing("fishing:target=3,strategy=class"), batch_with(1)
    seen = interrogated(attack, batch, model=QUICK, defense=defense)
    assert least < float(cosines(attack, seen, batch.take(slice(0, 1)))[0]) < most


@pytest.mark.integration
def test_the_isolated_gradient_is_inverted() -> None:
    """One picture in the place of its class, gray elsewhere, and the labels that were counted."""
    attack, batch = fishing("fishing:then=ig:tv=0.01;strategy=loop", Budget(1, 150)), batch_with(1, size=16)
    (found,) = attack([interrogated(attack, batch, model=QUICK)], seeds=[0])
    assert torch.equal(found.labels.bincount(minlength=10), batch.labels.bincount(minlength=10))
    place = int((found.labels == CAT).int().argmax())
    gray = found.inputs[torch.arange(16) != place]
    assert torch.equal(gray, torch.full_like(gray, 0.5))
    error = float((found.inputs[place] - batch.inputs[0]).square().mean())
    assert error < 0.5 * float((0.5 - batch.inputs[0]).square().mean()), "much nearer than gray"
    assert "after 2 questions" in found.strategy


def test_where_nobody_is_of_the_class_nothing_is_shown() -> None:
    attack, batch = fishing("fishing:target=3", Budget(1, 3)), batch_with(0, size=8)
    (found,) = attack([interrogated(attack, batch, model=QUICK)], seeds=[0])
    assert torch.equal(found.labels.sort().values, batch.labels.sort().values)
    assert torch.equal(found.inputs, torch.full_like(batch.inputs, 0.5))
    assert found.strategy == "no image of class 3"


def test_its_prior_alone_is_one_image_amid_gray() -> None:
    alone = fishing("fishing", Budget(1, 3)).prior_only()
    assert alone is not None
    (found,) = alone(observed(private_batches(1, 4)), seeds=[0])
    assert int((found.inputs == 0.5).flatten(1).all(dim=1).sum()) == 3


def test_it_says_what_it_cannot_do() -> None:
    (batch,) = private_batches(1, 2)
    with pytest.raises(GradveilError, match="'fishing' reads replies to its own questions"):
        fishing()(observed([batch]), seeds=[0])
    with pytest.raises(GradveilError, match="there are 10 classes"):
        interrogated(fishing("fishing:target=10"), batch, model=QUICK)
    with pytest.raises(GradveilError, match="asks questions of its own"):
        fishing("fishing:then=trap")
    with pytest.raises(GradveilError, match="queries is at least 4"):
        fishing("fishing:queries=3")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", pytest.param("resnet18:weights=cifar10", marks=pytest.mark.network)])
def test_resnet18(model: str) -> None:
    """Batch of 128: exact in eval mode, for one cat and for four; next to nothing in train mode."""
    attack, one, four = fishing("fishing:target=3"), batch_with(1), batch_with(4)
    cat, trained = one.take(slice(0, 1)), Recipe(train_mode=True)
    seen = interrogated(attack, one, model=model)
    assert len(asked(seen, attack)) == 2
    assert float(cosines(attack, seen, cat)[0]) > 0.95
    seen = interrogated(attack, one, model=model, recipe=trained)
    assert float(cosines(attack, seen, cat, trained)[0]) < 0.5
    seen = interrogated(attack, four, model=model)
    assert len(asked(seen, attack)) <= 10
    assert float(cosines(attack, seen, four).max()) > 0.95
