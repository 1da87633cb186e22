"""Who decides on a node: hostile run configs, secret draws, files, and the privacy that is spent."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from federated.flower.grids import DirectGrid
from gradveil import models
from gradveil.client import LocalRun
from gradveil.core.errors import GradveilError
from gradveil.core.types import Params
from gradveil.data import load
from gradveil.defenses import DEFENSES
from gradveil.defenses.accounting import Ledger
from gradveil.federated import Federation, Training, data_of, read_training
from gradveil.federated.flower import NODE_KEYS, OF_THE_SERVER, RUN_MAY_SET, client_app, read_node, server_app
from gradveil.federated.flower import client as clients
from gradveil.federated.flower.node import VARIABLE, NodeSettings
from gradveil.federated.flower.records import packed
from gradveil.federated.flower.spending import SPENT
from gradveil.federated.tap import new_name
from gradveil.threat import load_observations

MODEL = "mlp:hidden=16,depth=1"
RUN: dict[str, Any] = {"data": "mnist-samples", "model": MODEL, "clients": 2, "rounds": 2, "batch-size": 8}
NODE: dict[str, Any] = {"data": "mnist-samples", "defense": "noise:sigma=0.1", "on-suspicion": "train"}


def start(model: str = MODEL) -> Params:
    case = Training(data="mnist-samples", model=model)
    return Federation(case, load("mnist-samples")).state.params


def asked(grid: DirectGrid, place: int = 0, *, number: Any = 1, sent: Params | None = None) -> Message:
    content = RecordDict({"arrays": packed(start() if sent is None else sent)})
    content["config"] = ConfigRecord({"server-round": number})
    (reply,) = grid.send_and_receive([Message(content, 10 + place, "train")])
    return reply


def left(reply: Message) -> Params:
    assert reply.has_content(), reply
    return dict(reply.content["arrays"].to_torch_state_dict())


def flat(tree: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tree[name].flatten().double() for name in sorted(tree)])


# What is said on the node's side


def test_the_config_goes_over_the_environment_and_that_over_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    code = {"data": "mnist-samples", "defense": "clip:bound=1", "statistics": "send", "seed": 1}
    monkeypatch.setenv(VARIABLE, 'defense="clip:bound=2" seed=2 out="/somewhere"')
    found = read_node({}, {"defense": "clip:bound=3", "partition-id": 0, "num-partitions": 2}, code)
    assert found.training.defense == DEFENSES.canonical("clip:bound=3")
    assert (found.training.seed, found.statistics, found.out) == (2, "send", Path("/somewhere"))


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"data": "mnist-samples"}, "does not say how it is defended"),
        ({"defense": "clip"}, "does not say what it trains on"),
        (NODE | {"defence": "clip"}, "a node has no setting 'defence'; there are: "),
        (NODE | {"tap": "0@1"}, "a tap needs a folder"),
        (NODE | {"tap": "first", "out": "/x"}, "cannot read the tap 'first'"),
        (NODE | {"statistics": "hide"}, "statistics is one of withhold, send"),
        (NODE | {"on-suspicion": "panic"}, "on-suspicion is one of train, warn, refuse"),
        (NODE | {"repeatable": "yes"}, "repeatable is true or false"),
        (NODE | {"min-batch": 0}, "min-batch is a number of examples from 1, not 0"),
        (NODE | {"min-batch": True}, "min-batch is a number of examples from 1, not True"),
        (NODE | {"max-epsilon": 3.0}, "max-epsilon needs a defense with an epsilon"),
        (NODE | {"defense": "dp", "max-epsilon": 3.0}, "max-epsilon needs a folder"),
        (NODE | {"defense": "dp", "max-epsilon": -1}, "max-epsilon is a number above 0"),
        (NODE | {"defense": "precode"}, "changes the model by precode, and the run's by nothing"),
    ],
)
def test_a_node_that_says_too_little_or_nonsense_does_not_train(node: dict[str, Any], words: str) -> None:
    with pytest.raises(GradveilError, match=words):
        read_node(RUN, node)


def test_the_environment_in_another_form_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "defense=clip:bound=1 ==")
    with pytest.raises(GradveilError, match=f"{VARIABLE} cannot be read"):
        read_node(RUN, NODE)


def test_a_mistyped_argument_is_an_error_when_the_app_is_written() -> None:
    with pytest.raises(GradveilError, match="a node has no setting 'defence'"):
        client_app(defence="clip")


@pytest.mark.parametrize(
    ("wish", "own", "used"),
    [
        ("none", "clip:bound=1", "clip:bound=1.0"),
        ("noise:sigma=0", "clip:bound=1", "clip:bound=1.0"),
        ("clip:bound=1+noise:sigma=9", "none", "none"),
        ("precode:size=8", "none", "precode:size=8"),
        ("precode:size=8+noise:sigma=0", "clip:bound=1", "precode:size=8+clip:bound=1.0"),
        ("precode:size=8", "precode:size=8+clip:bound=1", "precode:size=8+clip:bound=1.0"),
    ],
)
def test_a_run_reshapes_the_model_and_chooses_no_defense(wish: str, own: str, used: str) -> None:
    assert read_node(RUN | {"defense": wish}, NODE | {"defense": own}).training.defense == used


def test_a_node_may_say_itself_what_a_run_may_not() -> None:
    own = {"batch-size": 1, "lr": 50.0, "model": "imprint:bins=8 > mlp:depth=0"}
    found = read_node(RUN, NODE | own).training
    assert (found.batch_size, found.lr) == (1, 50.0)
    assert found.model.startswith("imprint")


# What a hostile run config says

TEXTS = (
    "", "none", "true", "/etc", "../../x", "folder:path=/etc", "os:system", "noise:sigma=0", "clip:bound=1e30",
    "0@1 *@*", "imprint:bins=8 > mlp", "mlp:hidden=999999999", "mlp:hidden=1e9", "mlp:depth=4096,hidden=4096",
    "mlp:hidden=" + "9" * 80, "mlp:hidden=inf", "this:that", "\x1b[31mred\nline", "a" * 10**6, "9" * 5000,
    "cuda", "send", "fedsgd", "clip+clip",
    "+", ":", "=", "precode:size=65536", "dp:sigma=0", "E",
)  # fmt: skip
NUMBERS = (-1, 0, 1, 7, 11, 10**4, 2**31, 2**62, 10**5000, -0.5, 0.5, 1e9, 1e300, float("nan"), float("inf"))
VALUES = (*TEXTS, *NUMBERS, True, False, None, b"bytes", [1], [0.5] * 100, {"a": 1})
STRANGE = (
    "",
    "Defense",
    "defense ",
    "on_suspicion",
    "repeatable_",
    "node.defense",
    "partition-id",
    "side-by-side",
    "\n",
    "a" * 9999,
)
KEYS = (*sorted(NODE_KEYS | RUN_MAY_SET.keys() | OF_THE_SERVER), *STRANGE)


def protection(found: NodeSettings) -> tuple[dict[str, Any], list[str]]:
    """All that a run may not touch, and the links of the defense."""
    known = vars(found) | vars(found.training)
    facts = {
        "model", "algorithm", "lr", "epochs", "batch_size", "momentum", "weight_decay", "train_mode", "clients",
        "defense",
    }  # fmt: skip
    known.pop("training")
    return {name: value for name, value in known.items() if name not in facts}, DEFENSES.links(found.training.defense)


def assert_decided_by_the_node(hostile: dict[str, Any], node: dict[str, Any]) -> None:
    try:
        found = read_node(hostile, node)
    except GradveilError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 600
        return
    (rest, links), (own_rest, own_links) = protection(found), protection(read_node({}, node))
    assert rest == own_rest
    assert links[-len(own_links) :] == own_links or own_links == ["none"]
    assert all(DEFENSES.reshapes(link) for link in links[: -len(own_links)])


GUARDED = NODE | {
    "tap": "*@*",
    "out": "/node/own",
    "max-epsilon": 9.0,
    "defense": "dp:sigma=2",
    "statistics": "withhold",
}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key)[:20])
def test_no_value_of_any_key_of_a_run_config_touches_a_node(key: str) -> None:
    for value in VALUES:
        assert_decided_by_the_node({key: value}, GUARDED)
        assert_decided_by_the_node(RUN | {key: value}, NODE)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), st.sampled_from(VALUES) | st.text(max_size=20)))
def test_no_run_config_touches_a_node(hostile: dict[str, Any]) -> None:
    assert_decided_by_the_node(hostile, GUARDED)


@pytest.mark.parametrize("key", sorted(NODE_KEYS - RUN_MAY_SET.keys() - OF_THE_SERVER))
def test_what_only_a_node_decides_is_refused_from_a_run(key: str, tmp_path: Path) -> None:
    """Whatever its value, with one line for the server and in the log, and without a file."""
    grid = DirectGrid([client_app()] * 2, RUN | {key: str(tmp_path / "x")}, NODE)
    reply = asked(grid)
    assert f"the run config sets {key!r}, which only a node decides" in str(reply.error.reason)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        ({"repeatable": True, "seed": 11}, "'repeatable', which only a node decides"),
        ({"model": "os.path:join"}, "is not one that Gradveil ships"),
        ({"model": "imprint:bins=8 > mlp:depth=0"}, "is not one that Gradveil ships"),
        ({"model": "mlp:hidden=999999999"}, "above 4,096"),
        ({"model": "mlp:hidden=4096,depth=64"}, "the broadcast cannot be used: it is not of this model"),
        ({"batch-size": 1}, "batch-size is a number from 8 to 65,536, not 1"),
        ({"epochs": 10**9}, "epochs is a number from 1 to 100"),
        ({"clients": 10**9}, "clients is a number from 1 to 1,000,000"),
        ({"clients": 80}, "share 0 of 2, and the run is one of 80 clients"),
        ({"lr": 1e6}, "lr is a number from"),
    ],
)
def test_what_a_run_may_not_ask_is_one_line(
    hostile: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    built = clients._federation.cache_info().misses
    with caplog.at_level(logging.ERROR, logger="flwr"):
        reply = asked(DirectGrid([client_app()] * 2, RUN | hostile, NODE))
    assert words in str(reply.error.reason)
    assert str(reply.error.reason) in caplog.text
    assert "Traceback" not in caplog.text
    assert clients._federation.cache_info().misses == built, "nothing was built"


def test_a_folder_of_the_node_is_not_named_to_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = NODE | {"data": f"folder:path={tmp_path / 'patients'}"}
    with caplog.at_level(logging.ERROR, logger="flwr"):
        reply = asked(DirectGrid([client_app()] * 2, RUN, node))
    assert str(reply.error.reason) == "this node cannot read its data: its log says why"
    assert str(tmp_path / "patients") in caplog.text


def test_folders_of_the_run_are_the_servers(tmp_path: Path) -> None:
    node = NODE | {"tap": "*@*", "out": str(tmp_path / "node")}
    asked(DirectGrid([client_app()] * 2, RUN | {"out": str(tmp_path / "server")}, node), number=2)
    assert [path.name for path in tmp_path.iterdir()] == ["node"]
    assert len(list((tmp_path / "node" / "taps").iterdir())) == 2


@pytest.mark.parametrize("number", [None, -(2**62), 2**62, "1", 1.5])
def test_any_number_of_a_round_is_answered(number: Any, tmp_path: Path) -> None:
    node = NODE | {"tap": "*@*", "out": str(tmp_path / "node")}
    grid = DirectGrid([client_app()] * 2, RUN, node)
    content = RecordDict({"arrays": packed(start())})
    content["config"] = ConfigRecord({} if number is None else {"server-round": number})
    (reply,) = grid.send_and_receive([Message(content, 10, "train")])
    assert reply.has_content() or "names no 'server-round'" in str(reply.error.reason)
    assert {path.parent for path in tmp_path.rglob("*.safetensors")} <= {tmp_path / "node" / "taps"}


# How local batches are cut


def sizes(run: dict[str, Any], node: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Message, list[int]]:
    """A node's reply to a run, and on how many of its 40 examples it took each step."""
    taken: list[int] = []
    plain = LocalRun.request

    def counted(self: LocalRun) -> Any:
        taken.append(len(self.inputs[self.examples]))
        return plain(self)

    monkeypatch.setattr(LocalRun, "request", counted)
    return asked(DirectGrid([client_app()] * 2, RUN | run, NODE | node)), taken


@pytest.mark.parametrize(
    ("run", "node", "expected"),
    [
        ({"batch-size": 13}, {}, [13] * 3),
        ({"batch-size": 39}, {}, [39]),
        ({"batch-size": 39, "epochs": 2}, {"repeatable": True}, [39] * 2),
        ({"batch-size": 19}, {}, [19, 19, 2]),
        ({"batch-size": 19}, {"min-batch": 3}, [19, 19]),
        ({"batch-size": 13}, {"min-batch": 1}, [13, 13, 13, 1]),
        ({"batch-size": "none"}, {}, [40]),
        ({"batch-size": 13, "algorithm": "fedsgd"}, {}, [13]),
        ({"batch-size": 9}, {"batch-size": 1}, [1] * 40),
        ({"batch-size": 9}, {"batch-size": 13}, [13] * 3),
    ],
)
def test_no_batch_size_leaves_one_example_over(
    run: dict[str, Any], node: dict[str, Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, taken = sizes(run, node, monkeypatch)
    assert taken == expected
    count = expected[0] if "algorithm" in run else sum(expected) // run.get("epochs", 1)
    assert reply.content["metrics"]["num-examples"] == count


@pytest.mark.parametrize(
    ("run", "node"),
    [
        ({"batch-size": 8}, {"min-batch": 9}),
        ({"batch-size": 8, "algorithm": "fedsgd"}, {"min-batch": 9}),
        ({"batch-size": "none"}, {"min-batch": 41}),
        ({}, {"batch-size": 1, "min-batch": 2}),
        ({}, {"examples": 2}),
    ],
)
def test_a_node_whose_batches_are_all_too_small_does_not_train(
    run: dict[str, Any], node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, taken = sizes(run, node, monkeypatch)
    assert "the min-batch of this node" in str(reply.error.reason)
    assert taken == []


# What is drawn


def noises() -> dict[tuple[int, int], torch.Tensor]:
    """What two nodes added to their gradients in two rounds that had the same broadcast, by node and round."""
    run = RUN | {"algorithm": "fedsgd", "batch-size": "none", "seed": 11}
    sent = start()
    noisy = DirectGrid([client_app()] * 2, run, NODE)
    bare = DirectGrid([client_app()] * 2, run, NODE | {"defense": "none"})
    gradients = {place: flat(left(asked(bare, place, sent=sent))) for place in (0, 1)}
    replies = {(place, number): asked(noisy, place, number=number, sent=sent) for place in (0, 1) for number in (1, 2)}
    return {key: (flat(left(reply)) - gradients[key[0]]) / -0.1 for key, reply in replies.items()}


def test_noise_is_independent_between_nodes_and_between_rounds() -> None:
    drawn = noises()
    count = len(drawn[0, 1])
    assert count > 12_000
    for noise in drawn.values():
        assert float(noise.std()) == pytest.approx(0.1, rel=0.05)
    for one, other in itertools.combinations(drawn.values(), 2):
        assert not torch.equal(one, other)
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / count**0.5


def test_noise_is_not_what_the_servers_seed_gives() -> None:
    """With the same seed in process and on the nodes, where only those of a simulation say repeatable."""
    run = RUN | {"algorithm": "fedsgd", "batch-size": "none", "seed": 11}
    case = Training(
        data="mnist-samples",
        model=MODEL,
        clients=2,
        algorithm="fedsgd",
        batch_size=None,
        seed=11,
        defense="noise:sigma=0.1",
    )
    federation = Federation(case, data_of(case)[0])
    taken = {}
    federation.on_exchange = lambda one: taken.update({one.client: one.update})
    sent = federation.state.params
    federation.round(1)
    known = flat(taken[0])
    for repeatable in (True, False):
        node = NODE | {"seed": 11, "repeatable": repeatable}
        reply = left(asked(DirectGrid([client_app()] * 2, run, node), sent=sent))
        found = (flat(reply) - flat(sent)) / -0.1
        assert torch.allclose(found, known, atol=1e-4) == repeatable


@pytest.mark.parametrize("repeatable", [True, False])
def test_the_order_of_examples_is_secret_too(repeatable: bool) -> None:
    grid = DirectGrid([client_app(repeatable=repeatable)] * 2, RUN, NODE | {"defense": "none"})
    one, other = (flat(left(asked(grid))) for _ in range(2))
    assert torch.equal(one, other) == repeatable


# What is written, and what is spent


def test_a_tap_that_cannot_be_written_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "taps").write_text("a file in the place of the folder")
    run = RUN | {"out": str(tmp_path / "server")}
    grid = DirectGrid([client_app()] * 2, run, NODE | {"tap": "1@2", "out": str(tmp_path / "node")})
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run)
    words = "round 2: only 1 of 2 replies could be used, and 2 are needed; node 11: this node cannot write its tap"
    with caplog.at_level(logging.ERROR, logger="flwr"), pytest.raises(GradveilError, match=words) as raised:
        server_app()(grid, context)
    assert str(tmp_path) not in str(raised.value)
    assert f"cannot write {tmp_path / 'node' / 'taps'}" in caplog.text
    assert not read_training(tmp_path / "server")["complete"]


def test_a_round_that_comes_again_overwrites_no_tap(tmp_path: Path) -> None:
    node = NODE | {"tap": "*@*", "out": str(tmp_path)}
    names = [f"round-0001-client-0000{again}" for again in ("", "-2", "-3")]
    before: dict[str, bytes] = {}
    for _ in names:  # in one run, and in another that comes later
        reply = asked(DirectGrid([client_app()] * 2, RUN, node))
        after = {path.name: path.read_bytes() for path in (tmp_path / "taps").iterdir()}
        assert {name: after[name] for name in before} == before
        (name,) = {path for path in after.keys() - before.keys() if not path.endswith(".truth.safetensors")}
        (seen,) = load_observations(tmp_path / "taps" / name)
        sent = {name: left(reply)[name] - tensor for name, tensor in seen.sent.items()}
        assert torch.allclose(flat(seen.reply), flat(sent), atol=1e-6), "it is what has just left"
        before = after
    assert set(before) == {f"{name}{ending}" for name in names for ending in (".safetensors", ".truth.safetensors")}


def test_taps_that_are_written_at_once_get_names_of_their_own(tmp_path: Path) -> None:
    with new_name(tmp_path, "tap") as one, new_name(tmp_path, "tap") as other:
        assert (one, other) == ("tap", "tap-2")
        (tmp_path / "tap-2.safetensors").touch()
        with pytest.raises(GradveilError, match="tap-3"), new_name(tmp_path, "tap") as third:
            raise GradveilError(third)
    assert [path.name for path in tmp_path.iterdir()] == ["tap-2.safetensors"]
    (tmp_path / "tap.truth.safetensors").symlink_to("nowhere")
    with new_name(tmp_path, "tap") as fourth:
        assert fourth == "tap-3"


def test_a_run_that_may_go_on_without_a_node_says_so_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RUN | {"out": str(tmp_path), "min-nodes": 1}
    grid = DirectGrid([client_app()] * 2, run, NODE)
    del grid.contexts[11].node_config["defense"]
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        server_app()(grid, context)
    assert "2 replies dropped" in caplog.text
    assert (
        "the model is without the reply of node 11 in round 2: this node does not say how it is defended" in caplog.text
    )
    assert all("does not say" in row["dropped"][0]["reason"] for row in read_training(tmp_path)["rows"])


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "server").write_text("a file in the place of the folder")
    run = RUN | {"out": str(tmp_path / "server")}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run)
    with pytest.raises(GradveilError, match="cannot write"):
        server_app()(DirectGrid([client_app()] * 2, run, NODE), context)


def test_a_node_adds_up_the_epsilon_of_its_replies(caplog: pytest.LogCaptureFixture) -> None:
    run = RUN | {"epochs": 2}
    expected = Ledger()
    grid = DirectGrid([client_app()] * 2, run, NODE | {"defense": "dp:sigma=2"})
    with caplog.at_level(logging.INFO, logger="flwr"):
        for number in (1, 2):
            assert asked(grid, number=number).has_content()
            expected.add(2.0, 1.0, steps=2)
            assert f"has spent epsilon {expected.spent(1e-5):.4g} at delta 1e-05" in caplog.text
    kept = grid.contexts[10].state.config_records[SPENT]
    assert dict(kept) == {"sigma": [2.0], "rate": [1.0], "steps": [4]}
    assert SPENT not in grid.contexts[11].state.config_records


def test_a_node_keeps_its_count_from_run_to_run(tmp_path: Path) -> None:
    """Whoever submits runs could otherwise start it anew."""
    expected = Ledger()
    expected.add(2.0, 1.0, steps=2)
    bound = {"max-epsilon": expected.spent(1e-5) + 0.01, "out": str(tmp_path / "node")}
    replies = [
        asked(DirectGrid([client_app()] * 2, RUN, NODE | {"defense": "dp:sigma=2"} | bound), number=number)
        for number in (1, 1, 1)
    ]
    assert [reply.has_content() for reply in replies] == [True, True, False]
    said = str(replies[2].error.reason)
    assert "this reply does not leave: with it the node would have spent epsilon" in said
    (kept,) = (tmp_path / "node").glob("*.json")
    assert json.loads(kept.read_text()) == expected.state()
    for content in ("no json", "[[2.0, 1.0]]", '{"a": 1}', "[" * 10**5):
        kept.write_text(content)
        reply = asked(DirectGrid([client_app()] * 2, RUN, NODE | {"defense": "dp:sigma=2"} | bound))
        assert "privacy ledger" in str(reply.error.reason)


def test_a_count_that_cannot_be_kept_lets_nothing_leave(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file in the place of the folder")
    node = NODE | {"defense": "dp:sigma=2", "out": str(tmp_path / "file")}
    reply = asked(DirectGrid([client_app()] * 2, RUN, node))
    assert "this node cannot write its privacy ledger" in str(reply.error.reason)
    assert str(tmp_path) not in str(reply.error.reason)


def test_a_plan_holds_over_all_rounds() -> None:
    grid = DirectGrid([client_app()] * 2, RUN, NODE | {"defense": "dp:sigma=2,steps=1"})
    assert asked(grid).has_content()
    assert "more than the 1 that are planned" in str(asked(grid, number=2).error.reason)


def test_a_run_starts_no_download() -> None:
    with pytest.raises(GradveilError, match="download"):
        read_node(RUN | {"model": "resnet18:weights=cifar10"}, NODE)
    assert read_node(RUN, NODE | {"model": "resnet18:weights=cifar10"}).training.model.endswith("weights=cifar10")


def test_a_node_refuses_a_model_with_frozen_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node would build other ones, and no broadcast holds them."""

    def half_frozen(domain: Any) -> Any:
        module = models.MODELS.get("lenet")(domain)
        next(module.parameters()).requires_grad_(False)
        return module

    monkeypatch.setitem(models.MODELS._factories, "half-frozen", half_frozen)
    with pytest.raises(GradveilError, match="is frozen, and nodes would not have the same one"):
        clients._federation(Training(data="mnist-samples", model="half-frozen"))
