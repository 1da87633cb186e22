"""Observation files: they round-trip, and whatever else is in a file of that name is one clear line."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn
from torch.func import functional_call

from exchanges import SAMPLES, observed, private_batches
from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Recipe
from gradveil.defenses import DEFENSES, precode
from gradveil.domains import Images
from gradveil.threat import Observation, load_observations, observe, save_observations, threat_model
from gradveil.threat.storage import KIND, limit_parameters

FEDAVG = Recipe(sends="delta", epochs=2, batch_size=1, lr=0.05, momentum=0.9)


class Whole(bytes):
    """A file that a failing test does not print: of half a megabyte nothing else would be read."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "seen.safetensors"
    save_observations(path, observed(private_batches(2)))
    return Whole(path.read_bytes())


@pytest.mark.parametrize("model", ["lenet:init=wide", "convnet:width=8"])
@pytest.mark.parametrize(("threat", "recipe"), [("A", Recipe()), ("C", FEDAVG), ("C+labels", FEDAVG), ("H", Recipe())])
def test_round_trip(tmp_path: Path, model: str, threat: str, recipe: Recipe) -> None:
    seen = observed(private_batches(3, 2), model=model, threat=threat, recipe=recipe)
    save_observations(tmp_path / "seen.safetensors", seen)
    read = load_observations(tmp_path / "seen.safetensors")
    assert len(read) == 3
    for old, new in zip(seen, read, strict=True):
        for field in ("model", "domain", "threat", "kind", "batch_size", "recipe", "defense", "reshaped"):
            assert getattr(old, field) == getattr(new, field)
        for tree in ("sent", "reply"):
            assert getattr(old, tree).keys() == getattr(new, tree).keys()
            assert all(torch.equal(getattr(old, tree)[k], getattr(new, tree)[k]) for k in old.sent)
        assert (old.labels is None) == (new.labels is None)
        assert old.labels is None or new.labels is None or torch.equal(old.labels, new.labels)


def test_frozen_parameters_are_kept_as_the_buffers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader builds the model anew, with other random numbers in what is frozen."""

    def half_frozen(domain: Images) -> nn.Module:
        module = models.MODELS.get("lenet")(domain)
        next(module.parameters()).requires_grad_(False)
        return module

    monkeypatch.setitem(models.MODELS._factories, "half-frozen", half_frozen)
    module = models.build("half-frozen", SAMPLES.domain, seed=5)
    frozen = next(iter(module.parameters())).detach()
    sent, batch = models.trained_parameters(module), SAMPLES.batch([0])
    reply = SimulatedClient(module, recipe=Recipe()).reply(sent, batch, Stream.seeded(0)).update
    seen = observe(
        module=module, model="half-frozen", domain=SAMPLES.domain, sent=sent, batch=batch, recipe=Recipe(),
        reply=reply, defense="none", threat=threat_model("C"),
    )  # fmt: skip
    save_observations(tmp_path / "seen.safetensors", [seen])
    (read,) = load_observations(tmp_path / "seen.safetensors")
    assert read.sent.keys() == read.reply.keys() == sent.keys()
    name, loaded = next(iter(read.module.named_parameters()))
    assert name not in read.sent
    assert not loaded.requires_grad
    assert torch.equal(loaded, frozen)


def observed_reshaped(defense: str, *, model: str = "lenet", threat: str = "C") -> list[Observation]:
    """What is seen of two replies where the two sides agreed on the architecture that the defense makes."""
    built = DEFENSES.build(defense)
    module = built.on_model(models.build(model, SAMPLES.domain, seed=0))
    client = SimulatedClient(module, recipe=Recipe(), defense=built)
    sent = client.model.params
    return [
        observe(
            module=module, model=model, domain=SAMPLES.domain, sent=sent, batch=batch, recipe=Recipe(),
            reply=client.reply(sent, batch, Stream.seeded(i)).update, defense=defense, threat=threat_model(threat),
        )
        for i, batch in enumerate(private_batches(2))
    ]  # fmt: skip


@pytest.mark.parametrize(("model", "threat"), [("lenet", "A"), ("convnet:width=8", "C")])
def test_a_reshaped_architecture_travels_by_its_spec(tmp_path: Path, model: str, threat: str) -> None:
    seen = observed_reshaped("noise:sigma=0.1+precode:size=16,kl_weight=0.25", model=model, threat=threat)
    assert seen[0].reshaped == "precode:kl_weight=0.25,size=16", "public, even where the defense is not known"
    assert (seen[0].defense is None) == (threat == "A")
    save_observations(tmp_path / "x", seen)
    read = load_observations(tmp_path / "x")
    inputs = private_batches(1)[0].inputs
    for old, new in zip(seen, read, strict=True):
        assert new.reshaped == old.reshaped
        assert all(torch.equal(old.reply[name], new.reply[name]) for name in old.reply)
        theirs, ours = (functional_call(one.module, one.sent, (inputs,)) for one in (new, old))
        torch.testing.assert_close(theirs, ours)
    layers = [layer for layer in read[0].module.modules() if isinstance(layer, precode.Bottleneck)]
    assert [layer.kl_weight for layer in layers] == [0.25]


def test_a_users_own_model_is_reshaped_as_the_file_says(tmp_path: Path) -> None:
    seen = [replace(one, model="own.nets:small") for one in observed_reshaped("precode:size=16")]
    save_observations(tmp_path / "x", seen)
    module = models.build("lenet", SAMPLES.domain, seed=9)
    read = load_observations(tmp_path / "x", module=module)
    assert read[0].sent.keys() == dict(read[0].module.named_parameters()).keys()
    assert not any(isinstance(layer, precode.Bottleneck) for layer in module.modules()), "the given one is not edited"
    with pytest.raises(BadFileError, match="has its bottleneck already"):
        load_observations(tmp_path / "x", module=read[0].module)


def test_files_without_the_field_are_read(tmp_path: Path, valid: bytes) -> None:
    said, tensors = parts(valid)
    older = {key: value for key, value in said["meta"].items() if key != "reshaped"}  # type: ignore[attr-defined]
    assert "reshaped" in said["meta"]  # type: ignore[operator]
    read = load_observations(written(tmp_path / "x", {**said, "meta": older}, tensors))
    assert [one.reshaped for one in read] == [None, None]


def test_a_domain_that_names_no_kind_is_of_images(tmp_path: Path, valid: bytes) -> None:
    said, tensors = parts(valid)
    meta: dict[str, dict[str, object]] = said["meta"]  # type: ignore[assignment]
    assert list(meta["domain"]) == ["channels", "height", "width", "classes", "mean", "std"], "older versions read it"
    for kind in ({}, {"kind": "images"}):
        named = {**said, "meta": {**meta, "domain": {**meta["domain"], **kind}}}
        assert load_observations(written(tmp_path / "x", named, tensors))[0].domain == SAMPLES.domain
    for other in ("sounds", None, {"images": 1}):
        named = {**said, "meta": {**meta, "domain": {**meta["domain"], "kind": other}}}
        assert "impossible" in one_line(written(tmp_path / "x", named, tensors))


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
        ("reshaped", 7),
        ("reshaped", ["precode"]),
        ("reshaped", ""),
        ("reshaped", "none"),
        ("reshaped", "noise:sigma=0.1"),
        ("reshaped", "precode+noise"),
        ("reshaped", "precode\nnoise"),
        ("reshaped", "no-such-defense"),
        ("reshaped", "precode:size=-1"),
        ("reshaped", "precode:size=65536"),  # 600 MB if it were allocated
        ("reshaped", "precode:size=" + "9" * 150),
        ("reshaped", "precode:surprise=1"),
        ("reshaped", "precode:kl_weight=nan"),
        ("reshaped", "precode+precode"),
        ("reshaped", "+".join(["precode"] * 30)),
    ],
)
def test_an_impossible_header(tmp_path: Path, valid: bytes, field: str, value: object) -> None:
    said, tensors = parts(valid)
    changed = {**said, "meta": {**said["meta"], field: value}}  # type: ignore[dict-item]
    assert str(tmp_path / "x") in one_line(written(tmp_path / "x", changed, tensors)), "it names the file"


DOMAIN = {"channels": 3, "height": 32, "width": 32, "classes": 10, "mean": [0.5] * 3, "std": [0.2] * 3}
DELTA = {"sends": "delta", "lr": 0.1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 2**20}, "1,048,576 images of 3x32x32"),
        ({"domain": {**DOMAIN, "height": 8192, "width": 8192}, "batch_size": 2}, "2 images of 3x8192x8192"),
        ({"recipe": {**DELTA, "epochs": 10**9}}, "over 100,000 local steps"),
        ({"recipe": {**DELTA, "epochs": 10**400}}, "over 100,000 local steps"),
        ({"recipe": {**DELTA, "epochs": 10**4, "batch_size": 1}, "batch_size": 11}, "over 100,000 local steps"),
        ({"recipe": {"lr": 10**400}}, "a recipe's lr is a number"),
        ({"recipe": {"lr": 10**30}}, "a recipe's lr is a number"),
        ({"domain": {**DOMAIN, "mean": [10**400, 0.5, 0.5]}}, "mean of the inputs is one number"),
        ({"domain": {**DOMAIN, "std": [10**30, 0.5, 0.5]}}, "std of the inputs is one number"),
        ({"model": "vit:depth=1000000"}, "more parameters than the 20 tensors of the file"),
        ({"model": "mlp:depth=1000000,hidden=1"}, "more parameters than the 20 tensors of the file"),
        ({"model": "convnet:last=1_000_000_000"}, "its option last is 1_000_000_000"),
        ({"model": "mlp:hidden=" + "9" * 150}, "its option hidden is 9999"),
        ({"model": "vit:heads=0"}, "a model that cannot be: ZeroDivisionError"),
        ({"model": "vit:patch=-4"}, "a model that cannot be: RuntimeError"),
        ({"earlier": 1000}, "it has 20 tensors, too few"),
        ({"threat": "A" * 10**6}, "an impossible 'threat'"),
        ({"recipe": {"x" * 10**6: 1}}, "its header is impossible"),
        ({"loss": ["x" * 10**6]}, "an impossible 'loss'"),
        ({"loss": "x" * 10**6}, "load it with loss="),
    ],
)
def test_a_small_file_cannot_ask_for_much(tmp_path: Path, valid: bytes, changes: dict[str, object], said: str) -> None:
    header, tensors = parts(valid)
    changed = {**header, "meta": {**header["meta"], **changes}}  # type: ignore[dict-item]
    assert said in one_line(written(tmp_path / "x", changed, tensors))


def test_what_is_large_but_honest_is_read(tmp_path: Path, valid: bytes) -> None:
    header, tensors = parts(valid)
    for changes in ({"batch_size": 80_000}, {"recipe": {**DELTA, "epochs": 100_000}, "kind": "delta"}):
        changed = {**header, "meta": {**header["meta"], **changes}}  # type: ignore[dict-item]
        assert len(load_observations(written(tmp_path / "x", changed, tensors))) == 2


def test_parameters_are_counted_where_the_file_is_read() -> None:
    """And nowhere else: not in another thread, nor afterwards."""
    with limit_parameters(1), ThreadPoolExecutor() as others:
        others.submit(nn.Linear, 2, 2).result()
        with pytest.raises(GradveilError, match="more parameters than the 1 tensors"):
            nn.Linear(2, 2)
    nn.Linear(2, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("part", ["sent/", "reply/", "buffer/", "statistics/", ""])
def test_any_precision_becomes_that_of_the_model(tmp_path: Path, dtype: torch.dtype, part: str) -> None:
    save_observations(tmp_path / "x", observed(private_batches(1, 2), model="convnet:width=8", threat="E"))
    said, tensors = parts((tmp_path / "x").read_bytes())
    changed = {k: t.to(dtype) if k.startswith(part) and t.is_floating_point() else t for k, t in tensors.items()}
    assert any(tensor.dtype == dtype for tensor in changed.values())
    (read,) = load_observations(written(tmp_path / "x", said, changed))
    for tree in (read.sent, read.reply, read.statistics or {}, dict(read.module.named_buffers())):
        assert {tensor.dtype for tensor in tree.values() if tensor.is_floating_point()} == {torch.float32}
    torch.testing.assert_close(read.sent["linear.bias"], changed["sent/linear.bias"].float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_whole_numbers_are_no_parameters(tmp_path: Path, valid: bytes, dtype: torch.dtype) -> None:
    said, tensors = parts(valid)
    for names in ({"sent/fc.bias"}, {"reply/fc.weight"}, tensors.keys()):
        changed = {name: tensor.to(dtype) if name in names else tensor for name, tensor in tensors.items()}
        assert "where the model has float32" in one_line(written(tmp_path / "x", said, changed))


def test_too_large_for_the_model(tmp_path: Path, valid: bytes) -> None:
    said, tensors = parts(valid)
    changed = {**tensors, "sent/fc.bias": torch.full((10,), 1e300, dtype=torch.float64)}
    assert "'sent/fc.bias' holds numbers too large for float32" in one_line(written(tmp_path / "x", said, changed))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.tensor([[10]]), "not all from 0 to 9"),
        (torch.tensor([[-1]]), "not all from 0 to 9"),
        (torch.tensor([[2**62]]), "not all from 0 to 9"),
        (torch.tensor([[1.0]]), "float32, not whole numbers"),
        (torch.tensor([[True]]), "bool, not whole numbers"),
        (torch.tensor(1), "'labels' is a scalar, where"),
        (torch.tensor([1]), "'labels' is 1, where"),
        (torch.zeros(1, 0, dtype=torch.int64), "'labels' is 1x0, where"),
        (torch.zeros(3, 1, dtype=torch.int64), "'labels' is 3x1, where"),
    ],
)
@pytest.mark.parametrize("threat", ["C+labels", "A+labels"])
def test_labels_are_classes(tmp_path: Path, labels: torch.Tensor, said: str, threat: str) -> None:
    save_observations(tmp_path / "x", observed(private_batches(1), threat=threat))
    header, tensors = parts((tmp_path / "x").read_bytes())
    assert said in one_line(written(tmp_path / "x", header, {**tensors, "labels": labels}))
    (read,) = load_observations(written(tmp_path / "x", header, {**tensors, "labels": torch.tensor([[3]]).int()}))
    assert read.labels is not None
    assert read.labels.dtype == torch.int64


def test_a_file_cannot_name_code_to_run(tmp_path: Path, valid: bytes) -> None:
    said, tensors = parts(valid)
    changed = {**said, "meta": {**said["meta"], "model": "os.path:join"}}  # type: ignore[dict-item]
    assert "--model os.path:join" in one_line(written(tmp_path / "x", changed, tensors))


def test_a_file_cannot_have_other_defenses_built(tmp_path: Path, valid: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(spec: str) -> None:
        raise AssertionError(f"{spec} was built")

    monkeypatch.setattr(DEFENSES, "build", never)
    said, tensors = parts(valid)
    for spec in ("noise", "precode:size=4+noise:sigma=1e+3", "none"):
        changed = {**said, "meta": {**said["meta"], "reshaped": spec}}  # type: ignore[dict-item]
        assert "does not change the architecture" in one_line(written(tmp_path / "x", changed, tensors))


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


@pytest.mark.integration
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(
        ["model", "domain", "threat", "kind", "replies", "batch_size", "recipe", "defense", "reshaped"]
    ),
    value=JSON,
)
@example(field="recipe", value={"train_mode": 1})
@example(field="recipe", value={"\n": None})
@example(field="domain", value={"\n": None})
@example(field="reshaped", value="precode")
def test_fuzzed_headers_never_escape_as_another_error(tmp_path: Path, valid: bytes, field: str, value: object) -> None:
    said, tensors = parts(valid)
    meta = {**said["meta"], field: value}  # type: ignore[dict-item]
    written(tmp_path / "x", {"kind": KIND, "version": 1, "meta": meta}, tensors)
    try:
        load_observations(tmp_path / "x")
    except BadFileError as error:
        assert "\n" not in str(error)
