"""Inspection of broadcasts: every crafted one is flagged, no honest one is, and each check finds its own kind."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import broadcasts
from broadcasts import CIFAR, FEDAVG, LARGE, SMALL, Sent, parameters
from gradveil import models
from gradveil.attacks import ATTACKS, Server
from gradveil.client import CHECKS, SimulatedClient, inspect
from gradveil.client.inspection import Inspection
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import detached
from gradveil.core.types import Batch, Params, Recipe
from gradveil.models.resnet import BasicBlock

DOCS = Path(__file__).parents[2] / "docs"


def inspected(sent: Sent) -> Inspection:
    return inspect(sent.module, sent.params, domain=sent.data.domain, previous=sent.previous, recipe=sent.recipe)


def counted(broadcasts: Iterable[Sent], *, crafted: bool) -> int:
    """How many there were, all of them judged right."""
    judged = {sent.what: inspected(sent) for sent in broadcasts}
    assert {what: str(found) for what, found in judged.items() if found.suspicious is not crafted} == {}
    return len(judged)


@pytest.mark.integration
def test_none_of_224_honest_broadcasts_is_flagged() -> None:
    """72 initialisations, 24 models on their way, and 56 rounds of FedAvg and of FedSGD each under every defense."""
    fedavg = broadcasts.rounds("lenet", FEDAVG, count=4)
    fedsgd = broadcasts.rounds("mlp", Recipe(), count=4)
    honest = chain(broadcasts.initial(), broadcasts.trained(), fedavg, fedsgd)
    assert counted(honest, crafted=False) == 224


@pytest.mark.integration
def test_all_of_193_crafted_broadcasts_are_flagged() -> None:
    imprints = counted(broadcasts.imprinted(SMALL), crafted=True)
    traps = counted(broadcasts.trapped(), crafted=True)
    questions = counted(broadcasts.fished(SMALL), crafted=True)
    assert (imprints, traps, questions) == (144, 24, 25)


@pytest.mark.slow
def test_large_models() -> None:
    """ConvNet under every defense that fits it; untrained, imprinted and fished networks of the larger families."""
    fitting = tuple(name for name in broadcasts.DEFENSES if name not in ("dp", "veil"))
    rounds = broadcasts.rounds("convnet:width=8", FEDAVG, count=2, defenses=fitting)
    assert counted(chain(rounds, broadcasts.initial(LARGE, seeds=1)), crafted=False) == 2 * len(fitting) + 10
    attacks = ("imprint", "imprint:variant=sparse,query=dct")
    imprints = [broadcasts.crafted(attack, model, CIFAR) for attack in attacks for model in LARGE]
    assert counted(imprints, crafted=True) == 10
    assert counted(broadcasts.fished(LARGE), crafted=True) >= 2 * 3 * len(LARGE)


@pytest.mark.network
def test_a_published_network_is_clean() -> None:
    module = models.build("resnet18:weights=cifar10", CIFAR.domain, seed=0)
    assert not inspect(module, parameters(module), domain=CIFAR.domain, probe=CIFAR.batch(range(16))).suspicious


# Each check by itself, on a broadcast with one thing changed.

MLP = models.build("mlp:hidden=64", CIFAR.domain, seed=0)
HONEST = parameters(MLP)
ROWS, PIXELS = HONEST["body.0.weight"].shape


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "test"))


def some_copies() -> Params:
    """Three of four rows are the same up to scale, sign and a fifth of noise: they need not be neighbours."""
    weight, chosen = HONEST["body.0.weight"].clone(), torch.arange(ROWS) % 4 > 0
    weight[chosen] = 0.01 * drawn(48, 1) * (drawn(PIXELS) + 0.2 * drawn(48, PIXELS))
    return {"body.0.weight": weight}


def shuffled_traps() -> Params:
    """Rows of one balance whose halves are drawn independently and then scaled to it."""
    size = drawn(ROWS, PIXELS).abs()
    size[:, ::2] *= 0.95 * size[:, 1::2].sum(dim=1, keepdim=True) / size[:, ::2].sum(dim=1, keepdim=True)
    return {"body.0.weight": 0.01 * size * torch.tensor([1.0, -1.0]).repeat(PIXELS // 2)}


def mirror() -> Params:
    """Rows whose halves mirror each other, each by a factor of its own."""
    half = drawn(ROWS, PIXELS // 2).abs()
    factor = torch.linspace(0.5, 1.5, ROWS)[:, None]
    return {"body.0.weight": 0.01 * torch.cat([-half, factor * half.flip(1)], dim=1)}


def one_loud_class() -> Params:
    """All rows but one nearly parallel: p - y cancels for them."""
    weight = 0.1 * drawn(64).expand(10, 64) + 1e-3 * drawn(10, 64)
    weight[4] *= -1
    return {"fc.weight": weight, "fc.bias": torch.where(torch.arange(10) == 4, -20.0, 0.0)}


CHANGES: dict[str, Params] = {
    "copied rows": some_copies(),
    "bias ladder": {"body.0.bias": HONEST["body.0.weight"].norm(dim=1) * drawn(64).sort().values},
    "mirrored rows": mirror(),
    "equal balance": shuffled_traps(),
    "decisive bias": {"fc.bias": HONEST["fc.bias"] + 31 * (torch.arange(10) == 2)},
    "uneven rows": {"fc.weight": HONEST["fc.weight"] * (1 + 299.0 * (torch.arange(10) == 2))[:, None]},
    "silent rows": {"fc.weight": torch.zeros_like(HONEST["fc.weight"])},
    "one class speaks": one_loud_class(),
    "not finite": {"body.2.bias": HONEST["body.2.bias"] / 0},
    "other layers": {"front.weight": drawn(ROWS, PIXELS)},
}


@pytest.mark.parametrize("check", CHANGES)
def test_each_check_finds_its_own_kind(check: str) -> None:
    found = inspect(MLP, HONEST | CHANGES[check], domain=CIFAR.domain)
    assert found.suspicious
    named = next(finding for finding in found.findings if finding.check == check)
    assert named.figure > named.bound
    assert "\n" not in str(named)
    assert all(part in str(named) for part in (check, *named.where[:3]))


@pytest.mark.parametrize("check", sorted(CHANGES.keys() - {"uneven rows", "mirrored rows"}))
def test_a_check_is_alone_with_what_only_it_finds(check: str) -> None:
    found = inspect(MLP, HONEST | CHANGES[check], domain=CIFAR.domain)
    assert {finding.check for finding in found.findings} == {check}


def test_a_loud_row_is_heard_among_huge_ones() -> None:
    sent = HONEST | {"fc.weight": 1e25 * CHANGES["uneven rows"]["fc.weight"]}
    assert "uneven rows" in {finding.check for finding in inspect(MLP, sent).findings}


def test_a_layer_that_moves_alone() -> None:
    """By far more than a round can: found with the last broadcast at hand, and not without."""
    sent = HONEST | {"body.2.weight": HONEST["body.2.weight"] + 50 * drawn(64, 64)}
    found = inspect(MLP, sent, domain=CIFAR.domain, previous=HONEST, recipe=Recipe())
    assert [(finding.check, finding.where) for finding in found.findings] == [("moved alone", ("body.2",))]
    assert not inspect(MLP, sent, domain=CIFAR.domain).suspicious


def test_all_layers_may_move_together() -> None:
    sent = {name: tensor + 50 * drawn(*tensor.shape) for name, tensor in HONEST.items() if "fc" not in name}
    assert not inspect(MLP, HONEST | sent, domain=CIFAR.domain, previous=HONEST, recipe=Recipe()).suspicious


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), BasicBlock(8, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


@pytest.mark.parametrize("weights", ["fresh", "open"])
@pytest.mark.parametrize("model", [*SMALL, "a small resnet"])
def test_fresh_weights_are_told_by_the_last_broadcast_alone(model: str, weights: str) -> None:
    module = small_resnet() if model == "a small resnet" else models.build(model, CIFAR.domain, seed=0)
    honest = parameters(module)
    attack = ATTACKS.build(f"informed:replies=3,weights={weights}")
    crafted = attack.craft(Server(module, model, honest, CIFAR.domain), [None], 0)  # type: ignore[list-item]
    assert crafted is not None
    found = inspect(module, crafted.sent, domain=CIFAR.domain, previous=honest)
    assert {finding.check for finding in found.findings} == {"shuffled"}
    assert not inspect(module, crafted.sent, domain=CIFAR.domain).suspicious, "the page says so"
    client = SimulatedClient(module, recipe=Recipe(), on_suspicion="refuse")
    client.reply(honest, CIFAR.batch([0, 1]), Stream.seeded(0))
    with pytest.raises(GradveilError, match="another order"):
        client.reply(crafted.sent, CIFAR.batch([0, 1]), Stream.seeded(0))


def test_the_same_broadcast_again_is_a_note() -> None:
    found = inspect(MLP, HONEST, domain=CIFAR.domain, previous=detached(HONEST))
    assert [(finding.check, finding.severity) for finding in found.findings] == [("unchanged", "note")]
    assert not found.suspicious


@pytest.mark.parametrize("change", ["added", "missing", "reshaped"])
def test_other_layers_than_in_the_last_broadcast(change: str) -> None:
    previous = dict(HONEST)
    if change == "added":
        del previous["fc.bias"]
    elif change == "missing":
        previous["front.weight"] = drawn(3, 3)
    else:
        previous["fc.bias"] = drawn(11)
    found = inspect(MLP, HONEST, domain=CIFAR.domain, previous=previous)
    assert [finding.check for finding in found.findings] == ["other layers"]
    assert "the last broadcast" in found.summary


def test_an_added_layer_is_found_with_the_last_broadcast_at_hand() -> None:
    """The broadcast that an inspection exists for: it has a layer that neither the model nor the last one had."""
    found = inspect(MLP, HONEST | CHANGES["other layers"], domain=CIFAR.domain, previous=HONEST)
    assert [(finding.check, finding.where) for finding in found.findings] == [("other layers", ("front.weight",))] * 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("names", [["fc.bias"], ["fc.weight"], list(HONEST)])
def test_whole_numbers_in_place_of_fractions(dtype: torch.dtype, names: list[str]) -> None:
    sent = HONEST | {name: HONEST[name].to(dtype) for name in names}
    for previous in (None, HONEST, sent):
        found = inspect(MLP, sent, domain=CIFAR.domain, previous=previous)
        assert found.suspicious
        assert next(finding for finding in found.findings if finding.check == "other layers").where == tuple(
            sorted(names)
        )


def test_an_empty_broadcast_is_found() -> None:
    assert inspect(MLP, {}, domain=CIFAR.domain, previous=HONEST).suspicious


@pytest.mark.parametrize(
    "change",
    [
        {"body.0.bias": drawn(3)},
        {"body.0.bias": drawn(ROWS, 1)},
        {"body.0.weight": drawn(0, PIXELS)},
        {"fc.weight": drawn(0, 64), "fc.bias": drawn(0)},
        {"front.weight": drawn(64, 0), "front.bias": drawn(64)},
    ],
)
def test_layers_that_no_model_can_have(change: Params) -> None:
    found = inspect(MLP, HONEST | change, domain=CIFAR.domain, previous=HONEST)
    assert "other layers" in {finding.check for finding in found.findings}


PRECISIONS = [torch.float16, torch.bfloat16, torch.float64]


def in_precision(params: Params, dtype: torch.dtype) -> Params:
    return {name: tensor.to(dtype) for name, tensor in params.items()}


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_precisions_may_change_from_one_broadcast_to_the_next(dtype: torch.dtype) -> None:
    moved = HONEST | {"body.2.weight": HONEST["body.2.weight"] + 50 * drawn(64, 64)}
    for sent, last in ((dtype, torch.float32), (torch.float32, dtype), (dtype, dtype)):
        previous = in_precision(HONEST, last)
        honest = {name: tensor + 1e-2 for name, tensor in HONEST.items()}
        assert inspect(MLP, in_precision(honest, sent), domain=CIFAR.domain, previous=previous).findings == ()
        found = inspect(MLP, in_precision(moved, sent), domain=CIFAR.domain, previous=previous)
        assert [finding.check for finding in found.findings] == ["moved alone"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_may_be_of_another_precision(dtype: torch.dtype) -> None:
    """One with running statistics, which would stay in the precision of the model."""
    module = models.build("convnet:width=8", CIFAR.domain, seed=0).double()
    sent = in_precision(parameters(module), dtype)
    assert not inspect(module, sent, domain=CIFAR.domain, previous=sent).suspicious
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float64, torch.int64}, "it is not edited"


def test_too_large_for_float32() -> None:
    found = inspect(MLP, HONEST | {"fc.bias": torch.full((10,), 1e300, dtype=torch.float64)}, domain=CIFAR.domain)
    assert [finding.check for finding in found.findings] == ["not finite"]


def test_too_large_to_train_with() -> None:
    """Finite numbers whose products are not."""
    found = inspect(MLP, HONEST | {"fc.weight": 1e38 * drawn(10, 64)}, domain=CIFAR.domain)
    assert "NaN or infinity" in str(found)


def test_a_classifier_may_start_at_zero_if_it_was_built_so() -> None:
    module = copy.deepcopy(MLP)
    torch.nn.init.zeros_(module.get_parameter("fc.weight"))
    assert not inspect(module, parameters(module), domain=CIFAR.domain).suspicious


def test_what_could_not_be_checked_is_said() -> None:
    assert len(inspect(MLP, HONEST).left_out) == 2
    assert inspect(MLP, HONEST, domain=CIFAR.domain, previous=HONEST).left_out == ()
    assert inspect(MLP, HONEST | {"fc.bias": drawn(3)}, probe=CIFAR.batch([0])).left_out[0].endswith("agreed on")


def test_nothing_is_edited() -> None:
    module = models.build("convnet:width=8", CIFAR.domain, seed=0).train()
    state, sent = copy.deepcopy(module.state_dict()), parameters(module)
    before = detached(sent)
    inspect(module, sent, domain=CIFAR.domain, previous=before, probe=CIFAR.batch(range(4)))
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(torch.equal(tensor, sent[name]) for name, tensor in before.items())
    assert module.training
    assert not any(layer._forward_pre_hooks for layer in module.modules())


# The client


def batch() -> Batch:
    return CIFAR.batch(range(4))


def crafted() -> Params:
    return HONEST | some_copies()


def test_a_client_trains_on_anything_unless_told() -> None:
    client, watching = SimulatedClient(MLP, recipe=Recipe()), SimulatedClient(MLP, recipe=Recipe(), on_suspicion="warn")
    with pytest.warns(UserWarning, match="looks crafted: copied rows in body.0") as caught:
        update = watching.reply(crafted(), batch(), Stream.seeded(0)).update
    assert len(caught) == 1
    plain = client.reply(crafted(), batch(), Stream.seeded(0)).update
    assert all(torch.equal(tensor, update[name]) for name, tensor in plain.items())


def test_a_client_refuses_what_looks_crafted() -> None:
    client = SimulatedClient(MLP, recipe=Recipe(), on_suspicion="refuse")
    with pytest.raises(GradveilError, match=r"^the client does not train: the broadcast looks crafted: copied rows.*$"):
        client.reply(crafted(), batch(), Stream.seeded(0))
    assert client.reply(HONEST, batch(), Stream.seeded(0)).update.keys() == HONEST.keys()


def test_a_client_remembers_what_it_trained_on() -> None:
    client = SimulatedClient(MLP, recipe=Recipe(), on_suspicion="refuse")
    moved = HONEST | {"body.2.weight": HONEST["body.2.weight"] + 50 * drawn(64, 64)}
    sent = dict(HONEST)
    client.reply(sent, batch(), Stream.seeded(0))
    for _ in range(2):  # a broadcast that was refused is not what the next one is compared with
        with pytest.raises(GradveilError, match=r"moved alone in body\.2"):
            client.reply(moved, batch(), Stream.seeded(0))
    assert client.inspect(moved, probe=batch()).suspicious is False


@pytest.mark.parametrize(
    "sent",
    [
        HONEST | CHANGES["other layers"],
        HONEST | {"body.0.bias": drawn(3)},
        {name: tensor.long() for name, tensor in HONEST.items()},
        {name: tensor.bool() for name, tensor in HONEST.items()},
        {},
    ],
)
def test_a_client_refuses_what_does_not_fit(sent: Params) -> None:
    client = SimulatedClient(MLP, recipe=Recipe(), on_suspicion="refuse")
    for _ in range(2):  # at first without a broadcast to compare with, then with one
        with pytest.raises(
            GradveilError, match=r"^the client does not train: the broadcast looks crafted: other lay.*$"
        ):
            client.reply(sent, batch(), Stream.seeded(0))
        client.reply(HONEST, batch(), Stream.seeded(0))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_client_looks_at_any_precision(dtype: torch.dtype) -> None:
    client = SimulatedClient(MLP, recipe=Recipe(), on_suspicion="refuse")
    client.reply(HONEST, batch(), Stream.seeded(0))
    with pytest.raises(GradveilError, match=r"copied rows in body\.0"):
        client.reply(in_precision(crafted(), dtype), batch(), Stream.seeded(0))
    assert not client.inspect(in_precision(HONEST, dtype), HONEST, probe=batch()).suspicious


def test_honest_rounds_go_through_without_a_word() -> None:
    client = SimulatedClient(MLP, recipe=FEDAVG, on_suspicion="warn")
    sent = HONEST
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            update = client.reply(sent, batch(), Stream.seeded(number)).update
            sent = {name: tensor + update[name] for name, tensor in sent.items()}
    assert said == []


def test_on_suspicion_is_one_of_three() -> None:
    with pytest.raises(GradveilError, match="one of train, warn, refuse, not 'panic'"):
        SimulatedClient(MLP, recipe=Recipe(), on_suspicion="panic")  # type: ignore[arg-type]


def test_the_page_has_every_check() -> None:
    written = re.findall(r"^### `(.+)`$", (DOCS / "inspection.md").read_text(), flags=re.MULTILINE)
    assert sorted(written) == sorted(CHECKS)
    assert set(CHANGES) | {"moved alone", "shuffled", "unchanged"} == set(CHECKS)
