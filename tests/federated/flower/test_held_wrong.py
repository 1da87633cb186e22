"""Mods held wrong: whatever an app makes of them, an update leaves defended, or one line leaves in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.compat.common.parameter import ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitins_to_recorddict
from flwr.compat.common.typing import FitIns

from federated.flower.grids import DirectGrid
from gradveil.core.errors import GradveilError
from gradveil.core.trees import norm, subtract
from gradveil.core.types import Params
from gradveil.defenses import Log, Transform
from gradveil.federated.flower import checked, client_app, defended, inspected, tap

SENT: Params = {"weight": torch.linspace(-1, 1, 12).reshape(3, 4), "bias": torch.zeros(3)}
CHANGE = 0.5
BOUND = 0.01
CLIP = f"clip:bound={BOUND},per=global"
Reply = Callable[[Message, Context], RecordDict]


def asked(answer: Reply | None, *mods: Mod, sent: Params | None = None, kind: str = "train", **config: Any) -> Message:
    """What leaves a node whose app answers so, with these mods around all of it."""
    app = ClientApp(mods=list(mods))
    for register in (app.train(), app.train("more"), app.evaluate(), app.query()):
        register(lambda message, context: Message((answer or trained())(message, context), reply_to=message))
    content = RecordDict({"arrays": ArrayRecord(dict(SENT if sent is None else sent))})
    content["config"] = ConfigRecord({"server-round": 1, **config})
    (reply,) = DirectGrid([app]).send_and_receive([Message(content, 10, kind)])
    return reply


def trained(change: Callable[[Params], Any] = dict, record: str = "arrays", **others: Any) -> Reply:
    """An app that moves every float by CHANGE; ``change`` has the last word, ``others`` are further records."""

    def answer(message: Message, _context: Context) -> RecordDict:
        found = message.content["arrays"].to_torch_state_dict()
        moved = {name: t + CHANGE if t.is_floating_point() else t for name, t in found.items()}
        return RecordDict({record: _record(change(moved)), "metrics": MetricRecord({"num-examples": 5}), **others})

    return answer


def _record(arrays: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord({n: a if isinstance(a, Array) else Array(np.asarray(a)) for n, a in arrays.items()})


def moved_by(reply: Message, sent: Params = SENT) -> float:
    """How far what left is from the broadcast."""
    (record,) = reply.content.array_records.values()
    local = record.to_torch_state_dict()
    return float(norm(subtract({n: local[n].double() for n in sent}, {n: t.double() for n, t in sent.items()})))


def with_(name: str, value: Any) -> Callable[[Params], dict[str, Any]]:
    return lambda moved: {**moved, name: value}


def nobody(message: Message, _context: Context) -> RecordDict:
    raise ValueError(f"cannot read the record of Jane Doe {message.metadata.message_type}")


def keeps(message: Message, context: Context) -> RecordDict:
    """An app that keeps its bare update in the state of the node, which does not leave."""
    content = trained()(message, context)
    context.state["mine"] = content["arrays"]
    return content


DEFENDED: dict[str, tuple[Reply | None, tuple[Mod, ...], dict[str, Any]]] = {
    "as it should be": (None, (defended(CLIP),), {}),
    "twice": (None, (defended(CLIP), defended(CLIP)), {}),
    "two defenses": (None, (defended("sparsify:rate=0.5"), defended(CLIP)), {}),
    "two defenses, the other way round": (None, (defended(CLIP), defended("noise:sigma=0.1")), {}),
    "outside of the tap's place": (None, (checked, tap(lambda _: None), defended(CLIP)), {}),
    "inside of checked": (None, (checked, defended(CLIP)), {}),
    "outside of checked": (None, (defended(CLIP), checked), {}),
    "a renamed record": (trained(record="weights of mine"), (defended(CLIP),), {}),
    "half precision": (trained(lambda moved: {n: t.half() for n, t in moved.items()}), (defended(CLIP),), {}),
    "double precision": (trained(lambda moved: {n: t.double() for n, t in moved.items()}), (defended(CLIP),), {}),
    "whole numbers": (trained(lambda moved: {n: t.round().int() for n, t in moved.items()}), (defended(CLIP),), {}),
    "another order": (trained(lambda moved: dict(reversed(moved.items()))), (defended(CLIP),), {}),
    "another action": (None, (defended(CLIP),), {"kind": "train.more"}),
    "state of the node": (keeps, (defended(CLIP),), {}),
    "the server's seed": (None, (defended(CLIP),), {"seed": 3, "repeatable": True, "defense": "none"}),
}


@pytest.mark.parametrize("kind", DEFENDED)
def test_held_so_an_update_is_defended(kind: str) -> None:
    answer, mods, given = DEFENDED[kind]
    reply = asked(answer, *mods, **given)
    assert reply.has_content(), reply
    assert 0 < moved_by(reply) <= BOUND * 1.001
    assert moved_by(asked(None)) > 1, "the bare update is a long one"


class Wrong(Transform):
    """A defense of one's own that does not return what it was given."""

    def __init__(self, change: Callable[[Params], Params]) -> None:
        super().__init__()
        self.change = change

    def transform(self, tree: Params, rng: Any, log: Log) -> Params:  # noqa: ARG002
        return self.change(tree)


def breaks(_tree: Params) -> Params:
    raise ZeroDivisionError


LONG = [0.25] * 15
REFUSED: dict[str, tuple[Reply | None, tuple[Mod, ...], dict[str, Any], str]] = {
    "tap inside": (None, (defended(CLIP), tap(lambda _: None)), {}, "the tap stands inside of defended"),
    "no arrays": (
        lambda _message, _context: RecordDict({"metrics": MetricRecord({"num-examples": 5})}),
        (defended(CLIP),), {}, "carries one ArrayRecord, and this one has 0",
    ),
    "empty arrays": (
        lambda *_: RecordDict({"arrays": ArrayRecord({})}), (defended(CLIP),), {"sent": {}}, "no parameter",
    ),
    "two records": (trained(more=ArrayRecord(dict(SENT))), (defended(CLIP),), {}, "and this one has 2"),
    "complex": (trained(with_("bias", np.ones(3, np.complex64))), (defended(CLIP),), {}, "complex numbers"),
    "nan": (trained(with_("bias", np.full(3, np.nan, np.float32))), (defended(CLIP),), {}, "NaN or infinity"),
    "infinity": (trained(with_("bias", np.full(3, np.inf, np.float32))), (defended(CLIP),), {}, "NaN or infinity"),
    "too large": (trained(with_("bias", np.full(3, 1e300))), (defended(CLIP),), {}, "numbers too large"),
    "texts": (trained(with_("bias", np.array(["a", "b", "c"]))), (defended(CLIP),), {}, "cannot be read"),
    "sparse bytes": (
        trained(with_("bias", Array("float32", (3,), "scipy.sparse", b"abc"))), (defended(CLIP),), {}, "cannot be read",
    ),
    "sparse tensor": (
        trained(lambda moved: {"bias": moved["bias"].to_sparse()}), (defended(CLIP),), {}, "failed with TypeError",
    ),
    "more arrays": (trained(with_("pixels", np.ones(9))), (defended(CLIP),), {}, "'pixels' is missing, unknown"),
    "fewer arrays": (trained(lambda moved: {"bias": moved["bias"]}), (defended(CLIP),), {}, "'weight' is missing"),
    "other shape": (trained(with_("bias", np.ones((1, 3)))), (defended(CLIP),), {}, "'bias' is missing, unknown or of"),
    "gradients as a metric": (
        trained(loss=MetricRecord({"gradient": LONG})), (defended(CLIP),), {}, "carries list under 'gradient'",
    ),
    "gradients as a config": (
        trained(notes=ConfigRecord({"gradient": LONG})), (defended(CLIP),), {}, "carries list under 'gradient'",
    ),
    "bytes": (
        trained(notes=ConfigRecord({"blob": SENT["weight"].numpy().tobytes()})), (defended(CLIP),), {},
        "carries bytes under 'blob'",
    ),
    "a long text": (trained(notes=ConfigRecord({"note": "a" * 3000})), (defended(CLIP),), {}, "bytes beside"),
    "many metrics": (
        trained(many=MetricRecord({f"g{i}": 0.1 for i in range(300)})), (defended(CLIP),), {}, "bytes beside",
    ),
    "long names": (trained(**{"a" * 3000: MetricRecord()}), (defended(CLIP),), {}, "bytes beside"),  # type: ignore[arg-type]
    "evaluation with arrays": (None, (defended(CLIP),), {"kind": "evaluate"}, "a reply to evaluate carries arrays"),
    "query with arrays": (None, (defended(CLIP),), {"kind": "query"}, "a reply to query carries arrays"),
    "counter of one's own": (
        trained(with_("table", np.array([7, 8]))), (defended(CLIP),),
        {"sent": {**SENT, "table": torch.tensor([1, 2])}}, "'table' holds whole numbers that changed",
    ),
    "a broadcast with NaN": (
        None, (defended(CLIP),), {"sent": {**SENT, "bias": torch.full((3,), torch.nan)}}, "NaN or infinity",
    ),
    "a broadcast of complex numbers": (
        trained(), (defended(CLIP),), {"sent": {**SENT, "bias": torch.ones(3, dtype=torch.complex64)}}, "complex",
    ),
    "fewer names": (None, (defended(Wrong(lambda tree: {"bias": tree["bias"]})),), {}, "did not return the tensors"),
    "other shapes": (None, (defended(Wrong(lambda tree: {n: t[:1] for n, t in tree.items()})),), {}, "another shape"),
    "nan by the defense": (
        None, (defended(Wrong(lambda tree: {n: t * torch.nan for n, t in tree.items()})),), {}, "finite real numbers",
    ),
    "a defense that fails": (None, (defended(Wrong(breaks)),), {}, "the app failed with ZeroDivisionError"),
    "a defense that returns nothing": (None, (defended(Wrong(lambda _: None)),), {}, "did not return"),  # type: ignore[arg-type, return-value]
    "an app that fails": (nobody, (defended(CLIP),), {}, "the app failed with ValueError: the node's log says where"),
    "an app that returns nothing": (lambda *_: None, (defended(CLIP),), {}, "the app failed with"),  # type: ignore[arg-type, return-value,dict-item]
    "unknown to inspection": (None, (inspected(torch.nn.Linear(2, 2)),), {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_held_so_one_line_leaves(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    answer, mods, given, words = REFUSED[kind]
    with caplog.at_level(logging.ERROR, logger="flwr"):
        reply = asked(answer, *mods, **given)
    assert reply.has_error()
    said = str(reply.error.reason)
    assert words in said
    assert "\n" not in said
    assert "Jane Doe" not in said, "what an exception quotes stays on the node"
    assert said in caplog.text


def test_an_error_of_the_app_passes_as_it_is() -> None:
    app = ClientApp(mods=[tap(pytest.fail), checked, defended(CLIP)])  # type: ignore[arg-type]
    app.train()(lambda message, _context: Message(Error(77, "no data today"), reply_to=message))
    content = RecordDict({"arrays": ArrayRecord(dict(SENT)), "config": ConfigRecord({"server-round": 1})})
    (reply,) = DirectGrid([app]).send_and_receive([Message(content, 10, "train")])
    assert (reply.error.code, reply.error.reason) == (77, "no data today")


def test_evaluation_with_metrics_alone_passes() -> None:
    only = RecordDict({"metrics": MetricRecord({"num-examples": 5, "loss": 0.1})})
    reply = asked(lambda *_: only, defended(CLIP), checked, tap(pytest.fail), kind="evaluate")  # type: ignore[arg-type]
    assert reply.content["metrics"]["loss"] == 0.1


def test_no_defense_is_refused_when_the_app_is_written() -> None:
    with pytest.raises(GradveilError, match="defended needs a defense"):
        defended("none")


@pytest.mark.parametrize("name", ["censor", "dp", "precode", "clip+soteria"])
def test_a_defense_that_needs_more_than_the_update_is_refused_when_the_app_is_written(name: str) -> None:
    with pytest.raises(GradveilError, match="needs the client's model and data"):
        defended(name)


def test_an_unknown_choice_about_statistics_is_refused_when_the_app_is_written() -> None:
    with pytest.raises(GradveilError, match="statistics is one of withhold, defend, send"):
        defended(CLIP, statistics="hide")  # type: ignore[arg-type]


@pytest.mark.parametrize("statistics", ["withhold", "defend", "send"])
def test_running_statistics_leave_only_as_it_was_said(statistics: Any) -> None:
    norms = {
        "bn.running_mean": torch.zeros(3),
        "bn.running_var": torch.ones(3),
        "bn.num_batches_tracked": torch.tensor(4),
    }
    counted = trained(with_("bn.num_batches_tracked", np.int64(9)))
    reply = asked(counted, defended(CLIP, statistics=statistics), sent=SENT | norms)
    found = reply.content["arrays"].to_torch_state_dict()
    distance = max(float((found[name] - norms[name]).abs().max()) for name in ("bn.running_mean", "bn.running_var"))
    if statistics == "withhold":
        assert all(torch.equal(found[name], tensor) for name, tensor in norms.items())
    elif statistics == "defend":
        assert 0 < distance <= BOUND
        assert found["bn.num_batches_tracked"] == 4
    else:
        assert distance == pytest.approx(CHANGE)
        assert found["bn.num_batches_tracked"] == 9
    assert 0 < moved_by(reply) <= BOUND * 1.001


def test_a_seed_in_a_message_is_nobodys_seed() -> None:
    given: dict[str, Any] = {"seed": 3, "repeatable": True}
    one, other = (
        asked(None, defended("noise:sigma=0.1"), **given).content["arrays"].to_torch_state_dict()["weight"]
        for _ in range(2)
    )
    assert not torch.equal(one, other)


def test_an_app_of_the_older_kind_is_defended_too() -> None:
    class Client(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:  # noqa: ARG002
            return [array + CHANGE for array in parameters], 5, {}

    app = ClientApp(lambda _context: Client().to_client(), mods=[defended(CLIP)])
    arrays = [tensor.numpy() for tensor in SENT.values()]
    content = fitins_to_recorddict(FitIns(ndarrays_to_parameters(arrays), {}), keep_input=True)
    (reply,) = DirectGrid([app]).send_and_receive([Message(content, 10, "train")])
    (record,) = reply.content.array_records.values()
    change = [found.numpy() - array for found, array in zip(record.values(), arrays, strict=True)]
    assert 0 < float(np.sqrt(sum((part**2).sum() for part in change))) <= BOUND * 1.001


def test_a_mod_around_the_ready_app_comes_on_top_of_its_defense() -> None:
    node = {"data": "mnist-samples", "defense": "clip:bound=1"}
    config = {"model": "mlp:depth=0", "clients": 1}
    grid = DirectGrid([client_app(mods=[defended(CLIP)])], config, node)
    sent = {"fc.weight": torch.zeros(10, 784), "fc.bias": torch.zeros(10)}
    content = RecordDict({"arrays": ArrayRecord(dict(sent)), "config": ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([Message(content, 10, "train")])
    assert 0 < moved_by(reply, sent) <= BOUND * 1.001
