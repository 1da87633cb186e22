"""Observations on disk: one file holds one broadcast and any number of replies to it.

A file from outside names its architecture by registry specs, that of the model and those of the defenses that reshaped
it, never by code: a user's own model must be given by the user. Shapes are compared with the architecture before any
tensor is loaded, and tensors are turned into the precision of the model. Few bytes are enough to name much work, so
there are limits to what a file may ask for.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Annotated, Any, Literal, Self, cast

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_parameter_registration_hook

from gradveil import models
from gradveil.core.errors import BadFileError, GradveilError, in_one_line
from gradveil.core.fields import shown
from gradveil.core.registry import split_spec
from gradveil.core.tensor_files import Shapes, read_tensors, write_tensors
from gradveil.core.trees import stack
from gradveil.core.types import Json, Loss, Params, Recipe, cross_entropy
from gradveil.defenses import DEFENSES
from gradveil.domains import Domain, Images
from gradveil.threat.model import threat_model
from gradveil.threat.observation import Observation

KIND = "observation"
LARGEST_OPTION = 2**20
LARGEST_BATCH = 2**28
"""Numbers in the images behind one reply: 87,000 of CIFAR-10, 1,700 of ImageNet."""
MOST_STEPS = 100_000


def _only_reshaping(spec: str | None) -> str | None:
    """The spec in its one spelling if all its links change the architecture: no other defense is even built."""
    if spec is None:
        return None
    known = DEFENSES.canonical(spec)
    for link in DEFENSES.links(known):
        if not DEFENSES.reshapes(link):
            raise GradveilError(f"'reshaped' names {link!r}, a defense that does not change the architecture")
    return known


DOMAINS = {domain.kind: domain for domain in (Images,)}


def _domain(fields: Any) -> Domain:
    """A domain from its fields in a header; one that does not name its kind is of images, as all were at first."""
    if isinstance(fields, Domain):
        return fields
    values: Json = {k: tuple(v) if isinstance(v, list) else v for k, v in dict(fields).items()}
    kind = values.pop("kind", Images.kind)
    if kind not in DOMAINS:
        raise GradveilError(f"the kind of a domain is one of {', '.join(DOMAINS)}, not {shown(kind)}")
    return DOMAINS[kind](**values)


def _fields(domain: Domain) -> Json:
    """The fields of a domain in a header. Images do not name their kind, so that older versions read them too."""
    return dict(vars(domain)) if isinstance(domain, Images) else {"kind": domain.kind, **vars(domain)}


class Header(BaseModel):
    """What a file holds beside its tensors."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str = Field(max_length=200)
    domain: Annotated[Domain, PlainValidator(_domain), PlainSerializer(_fields)]
    threat: Annotated[str, Field(max_length=200), AfterValidator(lambda spec: threat_model(spec).name)]
    kind: Literal["gradient", "delta"]
    replies: int = Field(ge=1)
    batch_size: int | None = Field(default=None, ge=1, le=2**20)
    recipe: Annotated[
        Recipe | None, BeforeValidator(lambda fields: Recipe(**fields) if isinstance(fields, dict) else fields)
    ] = None
    defense: str | None = Field(default=None, max_length=500)
    reshaped: Annotated[str | None, Field(max_length=200), AfterValidator(_only_reshaping)] = None
    crafted: Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(lambda names: names or ())] = ()
    earlier: Annotated[int, Field(ge=0, le=1000), BeforeValidator(lambda count: 0 if count is None else count)] = 0
    loss: str | None = None
    """The name of a loss of the user's own."""
    round_number: int = Field(default=1, ge=1, le=2**20)

    @classmethod
    def read(cls, path: Path, meta: Json) -> Header:
        """The header of a file, checked."""
        try:
            return cls.model_validate(meta)
        except ValidationError as error:
            raise BadFileError(f"{path}: its header has an impossible {error.errors()[0]['loc'][0]!r}") from None
        except (TypeError, ValueError, GradveilError) as error:
            raise BadFileError(f"{path}: its header is impossible: {str(error)[:300]}") from None

    @model_validator(mode="after")
    def _check_work(self) -> Self:
        """Refuse more examples, or more local steps, than any attack could work on."""
        size, recipe = self.batch_size or 1, self.recipe
        if size * math.prod(self.domain.shape) > LARGEST_BATCH:
            shape = "x".join(map(str, self.domain.shape))
            raise GradveilError(
                f"{size:,} images of {shape} are over the {LARGEST_BATCH:,} numbers that a file may ask for"
            )
        if recipe is not None and recipe.epochs * -(-size // (recipe.batch_size or size)) > MOST_STEPS:
            raise GradveilError(f"its recipe takes over {MOST_STEPS:,} local steps, more than are repeated for a file")
        return self

    @property
    def places(self) -> list[str]:
        """Where the tensors of each exchange stand: of the earlier ones, and of the last."""
        return [*(f"earlier/{number}/" for number in range(self.earlier)), ""]


_OF_BOTH = Header.model_fields.keys() & Observation.__dataclass_fields__.keys() - {"earlier", "loss"}
"""What an observation and the header of its file have in common."""


def save_observations(path: Path, seen: Sequence[Observation]) -> None:
    """Write replies to the same broadcast into one file."""
    first = seen[0]
    same = all(
        broadcasts(one) == broadcasts(first) and one.model == first.model and one.threat == first.threat for one in seen
    )
    if not same:
        raise GradveilError("one observation file holds replies to one broadcast; write several files")
    own_loss = None if first.loss is cross_entropy else getattr(first.loss, "__qualname__", repr(first.loss))
    known = {name: getattr(first, name) for name in _OF_BOTH}
    # what could not be opened again is not written
    header = Header(**known, replies=len(seen), earlier=len(first.earlier), loss=own_loss)
    tensors = {f"buffer/{name}": tensor for name, tensor in _persistent_buffers(first.module).items()}
    for place, asked in zip(header.places, zip(*((*one.earlier, one) for one in seen), strict=True), strict=True):
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
    write_tensors(path, KIND, tensors, header.model_dump(mode="json"))


def broadcasts(one: Observation) -> tuple[int, ...]:
    """What the client was sent, the earlier broadcasts first: equal for observations that one file can hold."""
    return tuple(id(asked.sent) for asked in (*one.earlier, one))


def load_observations(
    path: Path, *, module: nn.Module | str | None = None, loss: Loss | None = None
) -> list[Observation]:
    """Read a file of observations.

    Where the file names a user's own code, ``module`` is the model as that builds it, before any defense reshaped it,
    or its spec, and ``loss`` what its clients minimise.
    """
    header: Header
    architecture: nn.Module

    def check(meta: Json, shapes: Shapes) -> None:
        nonlocal header, architecture
        header = Header.read(path, meta)
        own = models.build(module, header.domain, seed=0) if isinstance(module, str) else module
        # Shapes alone, and no more of them than the file has: a hostile header cannot make us allocate, or wait.
        with torch.device("meta"), limit_parameters(len(shapes)):
            model = _named_model(path, header) if own is None else copy.deepcopy(own).to("meta")
            _check_shapes(path, header, shapes, _as_sent(path, header, model))
        architecture = _as_sent(path, header, _named_model(path, header) if own is None else own)

    tensors, _ = read_tensors(path, KIND, check=check)
    if header.loss is not None and loss is None:
        raise BadFileError(
            f"{path}: its clients minimise {header.loss[:80]!r}, which is yours to give: load it with loss="
        )
    tensors = _like_model(path, tensors, architecture)
    architecture.load_state_dict(_part(tensors, "buffer/"), strict=False)
    labels, statistics = _labels(path, tensors, header.domain.classes), _part(tensors, "statistics/")

    known = {name: getattr(header, name) for name in _OF_BOTH} | {"loss": loss or cross_entropy}

    def observation(place: str, number: int, **more: Any) -> Observation:
        reply = {name: tensor[number] for name, tensor in _part(tensors, f"{place}reply/").items()}
        return Observation(module=architecture, sent=sent[place], reply=reply, **known, **more)

    sent = {place: _part(tensors, "sent/") | _part(tensors, f"{place}sent/") for place in header.places}
    return [
        observation(
            "",
            number,
            labels=None if labels is None else labels[number],
            statistics={name: tensor[number] for name, tensor in statistics.items()} or None,
            earlier=tuple(observation(place, number) for place in header.places[:-1]),
        )
        for number in range(header.replies)
    ]


def _named_model(path: Path, header: Header) -> nn.Module:
    """The model that the header names, without a front; its parameters do not matter, those of the file do."""
    _, spec = models.split_front(header.model)
    if models.is_import_path(spec):
        raise BadFileError(f"{path} is of the model {spec!r}, whose code is yours to give: add --model {spec}")
    with _named_by(path, "a model"):
        check_options(spec)
        # a file must not start a download, and brings its own weights; published ones are for inputs as they are
        name, options = split_spec(spec)
        if options.pop("weights", "none") != "none":
            options["normalize"] = "false"
        spec = name + ":" + ",".join(f"{key}={value}" for key, value in options.items())
        return models.build(spec, header.domain, seed=0)


def _as_sent(path: Path, header: Header, model: nn.Module) -> nn.Module:
    """The architecture that the defenses in the header make of the model, behind the front that the server put."""
    front, _ = models.split_front(header.model)
    with _named_by(path, "an architecture"):
        model = model if header.reshaped is None else DEFENSES.build(header.reshaped).on_model(model)
        return model if front is None else models.fronted(front, model, header.domain, seed=0)


@contextmanager
def _named_by(path: Path, what: str) -> Iterator[None]:
    """Whatever goes wrong while something is built that a file names is the file's fault."""
    try:
        yield
    except GradveilError as error:
        raise BadFileError(f"{path}: its header names {what} that cannot be: {error}") from None
    except Exception as error:  # a layer of -3 rows is anything from a RuntimeError to a ZeroDivisionError
        raise BadFileError(f"{path}: its header names {what} that cannot be: {in_one_line(error)[:200]}") from error


def check_options(spec: str) -> None:
    """Refuse a model whose options are out of proportion."""
    for key, text in split_spec(spec)[1].items():
        try:
            value = int(text)
        except ValueError:
            continue  # whoever builds the model says what it should be
        if abs(value) > LARGEST_OPTION:
            raise GradveilError(f"its option {key} is {text[:40]}, at most {LARGEST_OPTION:,} is read from a file")


@contextmanager
def limit_parameters(tensors: int) -> Iterator[None]:
    """Stop the building of a model once it has more parameters than the file has tensors.

    A depth of a million costs nothing to write and minutes to build, even without memory. The file has every parameter
    at least twice, as sent and in the replies, so that this leaves room for layers that are replaced on the way.
    """
    built, here = 0, get_ident()

    def count(_module: nn.Module, _name: str, _parameter: nn.Parameter) -> None:
        nonlocal built
        built += get_ident() == here  # the hook is global
        if built > tensors:
            raise GradveilError(f"it has more parameters than the {tensors} tensors of the file")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _check_shapes(path: Path, header: Header, shapes: Shapes, module: nn.Module) -> None:
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    if (1 + header.earlier) * len(parameters) > len(shapes):
        raise BadFileError(f"{path}: it has {len(shapes)} tensors, too few for the model and the replies of its header")
    wanted: Shapes = {}
    for place in header.places:
        sent = {f"{place}sent/{name}": shape for name, shape in parameters.items()}
        wanted |= {name: shape for name, shape in sent.items() if not place or name in shapes}
        wanted |= {f"{place}reply/{name}": (header.replies, *shape) for name, shape in parameters.items()}
    wanted |= {f"buffer/{name}": tuple(b.shape) for name, b in _persistent_buffers(module).items()}
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and f"statistics/{name}.mean" in shapes:
            both = (f"statistics/{name}.{part}" for part in ("mean", "variance"))
            wanted |= dict.fromkeys(both, (header.replies, layer.num_features))
    if "labels" in shapes:
        wanted["labels"] = (header.replies, header.batch_size or max((1, *shapes["labels"][1:])))

    def shown(shape: tuple[int, ...] | None) -> str:
        return "absent" if shape is None else "x".join(map(str, shape)) or "a scalar"

    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            raise BadFileError(
                f"{path}: tensor {name!r} is {shown(shapes.get(name))}, "
                f"where model {header.model!r} has {shown(wanted.get(name))}"
            )


def _like_model(path: Path, tensors: Params, module: nn.Module) -> Params:
    """All tensors but the labels in the precision of the model. Whole numbers in place of fractions are refused."""
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    usual = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    converted: Params = {}
    for name, tensor in tensors.items():
        dtype = dtypes.get(re.sub(r"^(earlier/\d+/)?(sent|reply|buffer)/", "", name), usual)
        if name == "labels" or tensor.dtype == dtype:
            converted[name] = tensor
            continue
        if tensor.is_floating_point() != dtype.is_floating_point:
            raise BadFileError(
                f"{path}: tensor {name!r} is of {_kind(tensor.dtype)}, where the model has {_kind(dtype)}"
            )
        converted[name] = tensor.to(dtype)
        if not bool(torch.isfinite(converted[name]).all()):
            raise BadFileError(f"{path}: tensor {name!r} holds numbers too large for {_kind(dtype)}")
    return converted


def _labels(path: Path, tensors: Params, classes: int) -> Tensor | None:
    """The labels as int64, each one a class; None where the file has none."""
    labels = tensors.get("labels")
    if labels is None:
        return None
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise BadFileError(f"{path}: its labels are of {_kind(labels.dtype)}, not whole numbers")
    if bool(((labels < 0) | (labels >= classes)).any()):
        raise BadFileError(f"{path}: its labels are not all from 0 to {classes - 1}, the classes of its domain")
    return labels.long()


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _part(tensors: Params, prefix: str) -> Params:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _persistent_buffers(module: nn.Module) -> Params:
    """What nobody trains: frozen parameters are among them."""
    parameters = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}
