"""Mods around a ClientApp in plain PyTorch that knows nothing of them: defenses, tap, inspection, and their order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import nn

from broadcasts import crafted
from federated.flower.grids import DirectGrid
from gradveil import defend_update, models
from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.core.errors import GradveilError
from gradveil.core.trees import norm, subtract
from gradveil.core.types import Params, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, Transform
from gradveil.federated.flower import MessageExchange, checked, defended, inspected, recorded, tap
from gradveil.federated.flower.mods import TRUSTED
from gradveil.threat import load_observations

DIGITS = load("mnist-samples")
MODEL = "mlp:hidden=16,depth=1"
RECIPE = Recipe(lr=0.1)


def module(spec: str = MODEL) -> nn.Module:
    return models.build(spec, DIGITS.domain, seed=0)


def app_with(*mods: Mod, spec: str = MODEL, spoil: Callable[[Params], Params] = dict) -> ClientApp:
    """One step of SGD on one digit, as Flower's tutorials write it; ``spoil`` has the last word inside the app."""
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        model = module(spec).train()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(keep_input=False))
        batch = DIGITS.batch([int(context.node_config["partition-id"])])
        optimizer = torch.optim.SGD(model.parameters(), lr=RECIPE.lr)
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()
        content = RecordDict(
            {"arrays": ArrayRecord(spoil(model.state_dict())), "metrics": MetricRecord({"num-examples": 1})}
        )
        return Message(content, reply_to=message)

    @app.evaluate(mods=list(mods))
    def evaluate(message: Message, _context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    return app


def asked(app: ClientApp, sent: Params | None = None, *, grid: DirectGrid | None = None, number: int = 1) -> Message:
    """The answer of the node that holds share 0."""
    sent = module().state_dict() if sent is None else sent
    content = RecordDict({"arrays": ArrayRecord(dict(sent)), "config": ConfigRecord({"server-round": number})})
    (reply,) = (grid or DirectGrid([app])).send_and_receive([Message(content, 10, "train")])
    return reply


def left(reply: Message) -> Params:
    return dict(reply.content["arrays"].to_torch_state_dict())


def test_a_defense_works_on_the_difference_that_leaves() -> None:
    sent, plain = module().state_dict(), left(asked(app_with()))
    spec = "clip:bound=0.01,per=global+sparsify:rate=0.5"
    found = left(asked(app_with(defended(spec))))
    expected = defend_update(subtract(plain, sent), defense=spec)
    for name, tensor in subtract(found, sent).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)
    clipped = left(asked(app_with(defended("clip:bound=0.01,per=global"))))
    assert norm(subtract(plain, sent)) > 0.02
    assert norm(subtract(clipped, sent)) == pytest.approx(0.01, rel=1e-3)


def test_draws_are_new_for_every_reply() -> None:
    app, plain = app_with(defended("noise:sigma=0.01")), left(asked(app_with()))
    one, other = (left(asked(app))["body.0.weight"] - plain["body.0.weight"] for _ in range(2))
    assert float(one.std()) == pytest.approx(0.01, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 5 / one.numel() ** 0.5


@pytest.mark.parametrize("apart", [0.0, 0.5], ids=["as they are", "with other values under each name"])
def test_tied_weights_leave_equal_whatever_the_server_sent(apart: float) -> None:
    """Two names with noise of their own would let the server halve the noise's variance by their mean."""
    trained = torch.randn(30, 20)

    def tied(state: Params) -> Params:
        return {**state, "first": trained, "second": trained.clone()}

    sent = {**module().state_dict(), "first": torch.zeros(30, 20), "second": torch.full((30, 20), apart)}
    app = ClientApp()

    @app.train(mods=[defended("noise:sigma=1")])
    def train(message: Message, _context: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord(tied(module().state_dict()))}), reply_to=message)

    found = left(asked(app, sent))
    assert torch.equal(found["first"], found["second"])
    assert float((found["first"] - trained).std()) == pytest.approx(1, rel=0.2)


def test_counters_and_evaluation_pass_a_defense() -> None:
    app = app_with(defended("noise:sigma=1", statistics="send"), checked, spec="convnet:width=1")
    sent = module("convnet:width=1").state_dict()
    counters = [name for name, tensor in sent.items() if not tensor.is_floating_point()]
    found = left(asked(app, sent))
    assert counters
    assert all(found[name] == 1 for name in counters)
    content = RecordDict({"arrays": ArrayRecord(dict(sent))})
    (reply,) = DirectGrid([app]).send_and_receive([Message(content, 10, "evaluate")])
    assert reply.has_content()


def test_noise_leaves_no_negative_variance() -> None:
    """A network with one would answer with NaN, though every number in it is finite."""
    sent = module("convnet:width=1").state_dict()
    mod = defended("noise:sigma=100", statistics="defend")  # nearly half of them go below
    found = left(asked(app_with(mod, spec="convnet:width=1"), sent))
    variances = [tensor for name, tensor in found.items() if name.endswith("running_var")]
    assert variances
    assert all(bool((tensor >= 0).all()) for tensor in variances)
    assert any(bool((tensor == 0).any()) for tensor in variances)


@pytest.mark.parametrize("name", sorted(DEFENSES))
def test_only_defenses_on_an_update_alone_become_mods(name: str) -> None:
    if isinstance(DEFENSES.build(name), Transform):
        assert asked(app_with(defended(name))).has_content()
    elif name != "none":
        with pytest.raises(GradveilError, match=r"gradveil\.protect in your train function, or gradveil's client_app"):
            defended(name)


def test_the_first_mod_sees_what_really_leaves() -> None:
    seen: list[MessageExchange] = []
    reply = asked(app_with(tap(seen.append), defended("clip:bound=0.001")), number=4)
    bare = left(asked(app_with()))
    for name, tensor in left(reply).items():
        assert torch.equal(seen[0].local[name], tensor)
        assert not torch.equal(bare[name], tensor)
    assert (seen[0].round_number, seen[0].client, seen[0].examples) == (4, 0, 1)


def test_a_recorded_exchange_can_be_attacked(tmp_path: Path) -> None:
    save = recorded(tmp_path, module=module(), model=MODEL, domain=DIGITS.domain, recipe=RECIPE)
    asked(app_with(tap(save), checked))
    (path,) = tmp_path.iterdir()
    assert path.name == "round-0001-client-0000.safetensors"
    (seen,) = load_observations(path)
    assert (seen.kind, seen.batch_size, seen.recipe, seen.defense, seen.labels) == ("gradient", 1, RECIPE, "none", None)
    (found,) = ATTACKS.build("analytic", BUDGETS["quick"])([seen], seeds=[0])
    torch.testing.assert_close(found.inputs, DIGITS.batch([0]).inputs, atol=1e-2, rtol=0)


def test_a_recorded_exchange_is_not_overwritten(tmp_path: Path) -> None:
    save = recorded(tmp_path / "taps", module=module(), model=MODEL, domain=DIGITS.domain, recipe=RECIPE)
    asked(app_with(tap(save)))
    (first,) = (tmp_path / "taps").iterdir()
    content = first.read_bytes()
    assert asked(app_with(tap(save), defended("noise:sigma=1"))).has_content()
    assert first.read_bytes() == content
    assert sorted(path.name for path in (tmp_path / "taps").iterdir()) == [
        "round-0001-client-0000-2.safetensors",
        "round-0001-client-0000.safetensors",
    ]


def test_a_folder_that_cannot_be_written_is_not_named_to_the_server(tmp_path: Path) -> None:
    (tmp_path / "taps").write_text("a file in the place of the folder")
    save = recorded(tmp_path / "taps", module=module(), model=MODEL, domain=DIGITS.domain, recipe=RECIPE)
    reason = str(asked(app_with(tap(save))).error.reason)
    assert "this node cannot write its tap (File exists)" in reason
    assert str(tmp_path) not in reason


def test_a_mod_does_not_pretend_to_know_labels(tmp_path: Path) -> None:
    known: dict[str, Any] = {"module": module(), "model": MODEL, "domain": DIGITS.domain, "recipe": RECIPE}
    with pytest.raises(GradveilError, match="knows labels, which a mod does not see"):
        recorded(tmp_path, **known, threat="C+labels")
    save = recorded(tmp_path, **known | {"module": module("mlp:depth=0")})
    reply = asked(app_with(tap(save)), module().state_dict())
    assert "the tap was told of another model" in str(reply.error.reason)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda local: {**local, "fc.bias": local["fc.bias"] * float("nan")}, "NaN or infinity"),
        (lambda local: {**local, "fc.bias": local["fc.bias"][:3]}, "'fc.bias' is missing, unknown or of another shape"),
        (lambda local: {name: tensor for name, tensor in local.items() if name != "fc.bias"}, "'fc.bias' is missing"),
    ],
    ids=["nan", "shape", "missing"],
)
@pytest.mark.parametrize("mod", [checked, defended("clip")], ids=["checked", "defended"])
def test_what_cannot_be_used_does_not_leave(mod: Mod, spoil: Callable[[Params], Params], words: str) -> None:
    reply = asked(app_with(mod, spoil=spoil))
    assert words in str(reply.error.reason)


@pytest.mark.parametrize("on_suspicion", ["refuse", "warn"])
def test_a_crafted_broadcast_is_seen_before_training(on_suspicion: Any, caplog: pytest.LogCaptureFixture) -> None:
    trained: list[MessageExchange] = []
    app = app_with(inspected(module(), on_suspicion=on_suspicion, domain=DIGITS.domain), tap(trained.append))
    with caplog.at_level(logging.WARNING, logger="flwr"):
        reply = asked(app, crafted("trap", MODEL, DIGITS).params)
    if on_suspicion == "refuse":
        assert "this node does not train: the broadcast looks crafted" in str(reply.error.reason)
        assert not trained
    else:
        assert "the broadcast looks crafted" in caplog.text
        assert len(trained) == 1


def test_an_honest_broadcast_is_trained_on_and_remembered() -> None:
    app = app_with(inspected(module(), domain=DIGITS.domain), checked)
    grid, sent = DirectGrid([app]), module().state_dict()
    assert asked(app, sent, grid=grid).has_content()
    kept = grid.contexts[10].state.array_records[TRUSTED].to_torch_state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in module().named_parameters())
    moved = {**sent, "fc.weight": sent["fc.weight"] + 1e4 * torch.eye(*sent["fc.weight"].shape)}
    assert "crafted" in str(asked(app, moved, grid=grid, number=2).error.reason)
