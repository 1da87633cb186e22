"""Observations on disk: one file holds one broadcast and any number of replies to it.

A file from outside names its architecture by registry specs, that of the model and those of the defenses that reshaped
it, never by code: a user's own model must be given by the user. Shapes are compared with the architecture before any
tensor is loaded, and tensors are turned into the precision of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil import models
from gradveil.client.local import cross_entropy
from gradveil.core.errors import BadFileError, GradveilError, in_one_line
from gradveil.core.registry import split_spec
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.core.trees import stack
from gradveil.core.types import Domain, Loss, Params, Recipe
from gradveil.defenses import DEFENSES
from gradveil.threat.limits import at_most, check_options, check_work
from gradveil.threat.model import threat_model
from gradveil.threat.observation import Observation
from gradveil.threat.precision import as_built, checked_labels

KIND = "observation"


def save_observations(path: Path, seen: Sequence[Observation]) -> None:
    """Write replies to the same broadcast into one file."""
    first = seen[0]
    same = all(
        broadcasts(one) == broadcasts(first) and one.model == first.model and one.threat == first.threat for one in seen
    )
    if not same:
        raise GradveilError("one observation file holds replies to one broadcast; write several files")
    check_work(first.domain, first.batch_size, first.recipe)  # what could not be opened again is not written
    tensors = {f"buffer/{name}": tensor for name, tensor in _persistent_buffers(first.module).items()}
    for number, asked in enumerate(zip(*((*one.earlier, one) for one in seen), strict=True)):
        place = f"earlier/{number}/" if number < len(first.earlier) else ""
        sent = asked[0].sent
        if place:  # only what was another then
            sent = {name: tensor.clone() for name, tensor in sent.items() if tensor is not first.sent[name]}
        tensors |= {f"{place}sent/{name}": tensor for name, tensor in sent.items()}
        tensors |= {f"{place}reply/{name}": tensor for name, tensor in stack([one.reply for one in asked]).items()}
    if first.labels is not None:
        tensors["labels"] = torch.stack([cast(Tensor, one.labels) for one in seen])
    if first.statistics is not None:
        per = stack([one.statistics or {} for one in seen])
        tensors |= {f"statistics/{name}": tensor for name, tensor in per.items()}
    meta = {
        "model": first.model,
        "domain": asdict(first.domain),
        "threat": first.threat,
        "kind": first.kind,
        "replies": len(seen),
        "batch_size": first.batch_size,
        "recipe": None if first.recipe is None else asdict(first.recipe),
        "defense": first.defense,
        "reshaped": first.reshaped,
        "crafted": list(first.crafted),
        "earlier": len(first.earlier),
        "loss": None if first.loss is cross_entropy else getattr(first.loss, "__qualname__", repr(first.loss)),
    }
    write_tensors(path, KIND, tensors, meta)


def broadcasts(one: Observation) -> tuple[int, ...]:
    """What the client was sent, the earlier broadcasts first: equal for observations that one file can hold."""
    return tuple(id(asked.sent) for asked in (*one.earlier, one))


def load_observations(path: Path, *, module: nn.Module | None = None, loss: Loss | None = None) -> list[Observation]:
    """Read a file of observations.

    Where the file names a user's own code, ``module`` is the model as that builds it, before any defense reshaped it,
    and ``loss`` what its clients minimise.
    """
    built: list[nn.Module] = []

    def check(meta: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        # Shapes alone, and no more of them than the file has: a hostile header cannot make us allocate, or wait.
        with torch.device("meta"), at_most(len(shapes)):
            model = _model(path, meta) if module is None else copy.deepcopy(module).to("meta")
            _check_shapes(path, meta, shapes, _as_sent(path, meta, model))
        built.append(_as_sent(path, meta, _model(path, meta) if module is None else module))

    tensors, meta = read_tensors(path, KIND, check=check)
    architecture = built[0]
    tensors = as_built(path, tensors, architecture)
    architecture.load_state_dict(_part(tensors, "buffer/"), strict=False)
    statistics, labels = _part(tensors, "statistics/"), checked_labels(path, tensors, read_domain(path, meta).classes)
    if meta.get("loss") is not None and loss is None:
        raise BadFileError(
            f"{path}: its clients minimise {str(meta['loss'])[:80]!r}, which is yours to give: load it with loss="
        )
    common = _header(path, meta) | {"module": architecture, "loss": loss or cross_entropy}
    count: int = meta["replies"]
    places = [f"earlier/{number}/" for number in range(meta.get("earlier") or 0)]
    asked = [_replies(tensors, place, common, count) for place in (*places, "")]
    return [
        replace(
            last,
            labels=None if labels is None else labels[i],
            statistics={name: tensor[i] for name, tensor in statistics.items()} or None,
            earlier=tuple(replies[i] for replies in asked[:-1]),
        )
        for i, last in enumerate(asked[-1])
    ]


def _replies(tensors: Params, place: str, common: dict[str, Any], count: int) -> list[Observation]:
    """All replies to one broadcast."""
    sent, replies = _part(tensors, "sent/") | _part(tensors, f"{place}sent/"), _part(tensors, f"{place}reply/")
    return [
        Observation(**common, sent=sent, reply={name: tensor[i] for name, tensor in replies.items()})
        for i in range(count)
    ]


def _model(path: Path, meta: dict[str, Any]) -> nn.Module:
    """The model that the header names, without a front; its parameters do not matter, those of the file do."""
    (_, spec), domain = models.split_front(_header(path, meta)["model"]), read_domain(path, meta)
    if models.is_import_path(spec):
        raise BadFileError(f"{path} is of the model {spec!r}, whose code is yours to give: add --model {spec}")
    with _named_by(path, "a model"):
        check_options(spec)
        return models.build(_without_weights(spec), domain, seed=0)


def _as_sent(path: Path, meta: dict[str, Any], model: nn.Module) -> nn.Module:
    """The architecture that the defenses in the header make of the model, behind the front that the server put."""
    header = _header(path, meta)
    spec, (front, _) = header["reshaped"], models.split_front(header["model"])
    with _named_by(path, "an architecture"):
        model = model if spec is None else DEFENSES.build(spec).on_model(model)
        return model if front is None else models.fronted(front, model, header["domain"], seed=0)


@contextmanager
def _named_by(path: Path, what: str) -> Iterator[None]:
    """Whatever goes wrong while something is built that a file names is the file's fault."""
    try:
        yield
    except GradveilError as error:
        raise BadFileError(f"{path}: its header names {what} that cannot be: {error}") from None
    except Exception as error:  # a layer of -3 rows is anything from a RuntimeError to a ZeroDivisionError
        raise BadFileError(f"{path}: its header names {what} that cannot be: {in_one_line(error)[:200]}") from error


def _without_weights(spec: str) -> str:
    """The same architecture without fetching weights for it: a file must not start a download, and brings its own.

    Published weights of this family are for inputs that are not normalised.
    """
    name, options = split_spec(spec)
    if options.pop("weights", "none") != "none":
        options["normalize"] = "false"
    return name + ":" + ",".join(f"{key}={value}" for key, value in options.items())


def _header(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """The fields of an Observation that the header gives, each checked."""
    model, kind, size, defense = (meta.get(key) for key in ("model", "kind", "batch_size", "defense"))
    recipe, reshaped, crafted = meta.get("recipe"), meta.get("reshaped"), meta.get("crafted") or []
    problems = [
        (isinstance(model, str) and len(model) <= 200, "model"),
        (kind in ("gradient", "delta"), "kind"),
        (size is None or (type(size) is int and 1 <= size <= 2**20), "batch_size"),
        (defense is None or (isinstance(defense, str) and len(defense) <= 500), "defense"),
        (reshaped is None or (isinstance(reshaped, str) and len(reshaped) <= 200), "reshaped"),
        (recipe is None or isinstance(recipe, dict), "recipe"),
        (isinstance(meta.get("threat"), str) and len(meta["threat"]) <= 200, "threat"),
        (isinstance(crafted, list) and all(isinstance(name, str) for name in crafted), "crafted"),
        (meta.get("earlier") is None or (type(meta["earlier"]) is int and 0 <= meta["earlier"] <= 1000), "earlier"),
        (type(meta.get("replies")) is int and meta["replies"] >= 1, "replies"),
    ]
    for good, field in problems:
        if not good:
            raise BadFileError(f"{path}: its header has an impossible {field!r}")
    domain = read_domain(path, meta)
    try:
        how = None if recipe is None else Recipe(**recipe)
        check_work(domain, size, how)
        return {
            "model": model,
            "kind": cast(Literal["gradient", "delta"], kind),
            "batch_size": size,
            "defense": defense,
            "domain": domain,
            "threat": threat_model(meta["threat"]).name,
            "recipe": how,
            "reshaped": None if reshaped is None else _only_reshaping(reshaped),
            "crafted": tuple(crafted),
        }
    except (TypeError, GradveilError) as error:
        raise BadFileError(f"{path}: its header is impossible: {str(error)[:300]}") from None


def _only_reshaping(spec: str) -> str:
    """The spec in its one spelling if all its links change the architecture: no other defense is even built."""
    known = DEFENSES.canonical(spec)
    for link in DEFENSES.links(known):
        if not DEFENSES.reshapes(link):
            raise GradveilError(f"'reshaped' names {link!r}, a defense that does not change the architecture")
    return known


def read_domain(path: Path, meta: dict[str, Any]) -> Domain:
    """The domain that a header names, checked."""
    said = meta.get("domain")
    try:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in dict(said or {}).items()}
        return Domain(**values)
    except (TypeError, ValueError, GradveilError) as error:
        raise BadFileError(f"{path}: its header has an impossible 'domain': {str(error)[:300]}") from None


def _check_shapes(path: Path, meta: dict[str, Any], shapes: dict[str, tuple[int, ...]], module: nn.Module) -> None:
    _header(path, meta)
    replies: int = meta["replies"]
    if (1 + (meta.get("earlier") or 0)) * len(dict(module.named_parameters())) > len(shapes):
        raise BadFileError(f"{path}: it has {len(shapes)} tensors, too few for the model and the replies of its header")
    wanted: dict[str, tuple[int, ...]] = {}
    for place in ("", *(f"earlier/{number}/" for number in range(meta.get("earlier") or 0))):
        sent = {f"{place}sent/{name}": tuple(p.shape) for name, p in module.named_parameters()}
        wanted |= {name: shape for name, shape in sent.items() if not place or name in shapes}
        wanted |= {f"{place}reply/{name}": (replies, *p.shape) for name, p in module.named_parameters()}
    wanted |= {f"buffer/{name}": tuple(b.shape) for name, b in _persistent_buffers(module).items()}
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and f"statistics/{name}.mean" in shapes:
            both = (f"statistics/{name}.{part}" for part in ("mean", "variance"))
            wanted |= dict.fromkeys(both, (replies, layer.num_features))
    if "labels" in shapes:
        wanted["labels"] = (replies, meta.get("batch_size") or max((1, *shapes["labels"][1:])))
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            raise BadFileError(
                f"{path}: tensor {name!r} is {_shape(shapes.get(name))}, "
                f"where model {meta['model']!r} has {_shape(wanted.get(name))}"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "a scalar"


def _part(tensors: Params, prefix: str) -> Params:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _persistent_buffers(module: nn.Module) -> Params:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}
