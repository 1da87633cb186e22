"""Observation files: they round-trip, and whatever else is in a file of that name is one clear line."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch.func import functional_call

from exchanges import observed, private_batches
from gradveil import models
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.types import Recipe
from gradveil.threat import load_observations, save_observations
from gradveil.threat.storage import KIND

FEDAVG = Recipe(sends="delta", epochs=2, batch_size=1, lr=0.05, momentum=0.9)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "seen.safetensors"
    save_observations(path, observed(private_batches(2)))
    return path.read_bytes()


@pytest.mark.parametrize("model", ["lenet:init=wide", "convnet:width=8"])
@pytest.mark.parametrize(("threat", "recipe"), [("A", Recipe()), ("C", FEDAVG), ("C+labels", FEDAVG), ("H", Recipe())])
def test_round_trip(tmp_path: Path, model: str, threat: str, recipe: Recipe) -> None:
    seen = observed(private_batches(3, 2), model=model, threat=threat, recipe=recipe)
    save_observations(tmp_path / "seen.safetensors", seen)
    read = load_observations(tmp_path / "seen.safetensors")
    assert len(read) == 3
    for old, new in zip(seen, read, strict=True):
        for field in ("model", "domain", "threat", "kind", "batch_size", "recipe", "defense"):
            assert getattr(old, field) == getattr(new, field)
        for tree in ("sent", "reply"):
            assert getattr(old, tree).keys() == getattr(new, tree).keys()
            assert all(torch.equal(getattr(old, tree)[k], getattr(new, tree)[k]) for k in old.sent)
        assert (old.labels is None) == (new.labels is None)
        assert old.labels is None or new.labels is None or torch.equal(old.labels, new.labels)


def test_buffers_travel_with_the_broadcast(tmp_path: Path) -> None:
    (seen,) = observed(private_batches(1), model="resnet18")
    with torch.no_grad():
        next(buffer for name, buffer in seen.module.named_buffers() if name.endswith("running_mean")).fill_(0.25)
    save_observations(tmp_path / "seen.safetensors", [seen])
    (read,) = load_observations(tmp_path / "seen.safetensors")
    assert next(b for n, b in read.module.named_buffers() if n.endswith("running_mean")).unique().tolist() == [0.25]


def one_line(path: Path) -> str:
    with pytest.raises(BadFileError) as caught:
        load_observations(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def parts(content: bytes) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    return json.loads(header["__metadata__"]["gradveil"]), load(content)


def written(path: Path, said: object, tensors: dict[str, torch.Tensor]) -> Path:
    path.write_bytes(save(tensors, metadata={"gradveil": json.dumps(said)}))
    return path


def test_truncated(tmp_path: Path, valid: bytes) -> None:
    path = tmp_path / "seen.safetensors"
    for length in (0, 4, 8, 100, len(valid) // 2, len(valid) - 1):
        path.write_bytes(valid[:length])
        assert "damaged" in one_line(path)


def test_renamed(tmp_path: Path, valid: bytes) -> None:
    said, tensors = parts(valid)
    assert "was it renamed" in one_line(written(tmp_path / "x", {**said, "kind": "reconstruction"}, tensors))
    (tmp_path / "y").write_bytes(save(tensors))
    assert "not written by Gradveil" in one_line(tmp_path / "y")
    assert "no file" in one_line(tmp_path / "z")


def test_not_finite(tmp_path: Path, valid: bytes) -> None:
    said, tensors = parts(valid)
    for bad in (torch.nan, torch.inf):
        changed = {**tensors, "reply/fc.bias": torch.full_like(tensors["reply/fc.bias"], bad)}
        assert "'reply/fc.bias' holds NaN or infinity" in one_line(written(tmp_path / "x", said, changed))


def test_shapes_that_are_not_the_models(tmp_path: Path, valid: bytes) -> None:
    said, tensors = parts(valid)
    path = tmp_path / "x"
    wide = {**tensors, "sent/fc.weight": torch.zeros(10, 999)}
    assert "10x999, where model 'lenet:init=wide' has 10x768" in one_line(written(path, said, wide))
    fewer = {k: v for k, v in tensors.items() if k != "sent/fc.bias"}
    assert "is absent, where" in one_line(written(path, said, fewer))
    more = {**tensors, "sent/extra": torch.zeros(2)}
    assert "where model 'lenet:init=wide' has absent" in one_line(written(path, said, more))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "mlp:hidden=100000000"),  # 1.2 TB if it were allocated
        ("model", "no-such-model"),
        ("model", 7),
        ("domain", {"channels": 10**12}),
        ("domain", None),
        ("kind", "weights"),
        ("replies", 0),
        ("replies", 10**15),
        ("batch_size", -1),
        ("recipe", {"lr": -1}),
        ("recipe", {"surprise": 1}),
        ("threat", "Z"),
        ("defense", ["x"]),
    ],
)
def test_an_impossible_header(tmp_path: Path, valid: bytes, field: str, value: object) -> None:
    said, tensors = parts(valid)
    changed = {**said, "meta": {**said["meta"], field: value}}  # type: ignore[dict-item]
    assert str(tmp_path / "x") in one_line(written(tmp_path / "x", changed, tensors)), "it names the file"


def test_a_file_cannot_name_code_to_run(tmp_path: Path, valid: bytes) -> None:
    said, tensors = parts(valid)
    changed = {**said, "meta": {**said["meta"], "model": "os.path:join"}}  # type: ignore[dict-item]
    assert "--model os.path:join" in one_line(written(tmp_path / "x", changed, tensors))


def test_a_file_cannot_start_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    seen = observed(private_batches(1), model="resnet18:normalize=false")
    save_observations(tmp_path / "x", [replace(one, model="resnet18:weights=cifar10") for one in seen])
    (read,) = load_observations(tmp_path / "x")
    inputs = private_batches(1)[0].inputs
    theirs, ours = (functional_call(one.module, one.sent, (inputs,)) for one in (read, seen[0]))
    torch.testing.assert_close(theirs, ours)


def test_a_users_own_model_is_given_by_the_user(tmp_path: Path) -> None:
    seen = observed(private_batches(1))
    own = [type(one)(**{**one.__dict__, "model": "own.nets:small"}) for one in seen]
    save_observations(tmp_path / "x", own)
    module = models.build("lenet", seen[0].domain, seed=9)
    (read,) = load_observations(tmp_path / "x", module=module)
    assert read.module is module
    with pytest.raises(BadFileError, match="where model"):
        load_observations(tmp_path / "x", module=models.build("mlp", seen[0].domain, seed=9))


def test_replies_to_different_broadcasts_need_different_files(tmp_path: Path) -> None:
    mixed = [*observed(private_batches(1)), *observed(private_batches(1), seed=1)]
    with pytest.raises(GradveilError, match="one broadcast"):
        save_observations(tmp_path / "x", mixed)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert"]),
        st.booleans(),
        st.integers(0, 2**31),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES)
def test_fuzzed_bytes_never_escape_as_another_error(
    tmp_path: Path, valid: bytes, changes: list[tuple[str, bool, int, bytes]]
) -> None:
    """Bytes flipped, cut or put in anywhere, every second time in the header: the file loads or is a BadFileError."""
    (length,) = struct.unpack("<Q", valid[:8])
    content = bytearray(valid)
    for kind, in_header, place, new in changes:
        at = place % (min(length + 8, len(content)) if in_header else len(content)) if content else 0
        if kind == "insert":
            content[at:at] = new
        elif kind == "flip":
            content[at : at + len(new)] = new
        else:
            del content[at:]
    path = tmp_path / "fuzzed.safetensors"
    path.write_bytes(bytes(content))
    try:
        load_observations(path)
    except BadFileError as error:
        assert "\n" not in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(["model", "domain", "threat", "kind", "replies", "batch_size", "recipe", "defense"]),
    value=JSON,
)
@example(field="recipe", value={"train_mode": 1})
def test_fuzzed_headers_never_escape_as_another_error(tmp_path: Path, valid: bytes, field: str, value: object) -> None:
    said, tensors = parts(valid)
    meta = {**said["meta"], field: value}  # type: ignore[dict-item]
    written(tmp_path / "x", {"kind": KIND, "version": 1, "meta": meta}, tensors)
    try:
        load_observations(tmp_path / "x")
    except BadFileError as error:
        assert "\n" not in str(error)
