"""From a spec such as ``lenet:init=wide``, ``mypackage.nets:small`` or ``imprint > lenet`` to a model seen to work.

Families register here; a factory takes the domain, and its options by keyword. What every family does to its inputs
first stands here too.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, in_one_line
from gradveil.core.plugins import import_object
from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import Registry, join_spec, parse_options, split_spec
from gradveil.core.seeding import isolated
from gradveil.domains import Domain, Images
from gradveil.models.fronts import fronted, fronted_spec, split_front

MODELS: Registry[nn.Module] = Registry("model")

Init = Literal["default", "he"]
M = TypeVar("M", bound=nn.Module)

SMALL_SIDE = 64
"""The longest side that ``auto`` options still take for a small image, in the manner of CIFAR rather than ImageNet."""
_ANY_VALUE = int | float | bool | str


def build(spec: str, domain: Domain, *, seed: int, progress: Progress = SILENT) -> nn.Module:
    """A model in eval mode, initialised from ``seed`` alone; torch's global generator is left as it was.

    A factory whose second argument is ``progress`` works for longer and reports there.

    >>> digits = Images(channels=1, height=28, width=28, classes=10, mean=(0.13,), std=(0.31,))
    >>> sum(p.numel() for p in build("lenet:init=wide", digits, seed=0).parameters())
    17038
    """
    front, behind = split_front(spec)
    name, factory, options = factory_of(behind)
    with isolated(seed, "model", name):
        waits = "progress" in inspect.signature(factory).parameters
        model = (factory(domain, progress, **options) if waits else factory(domain, **options)).eval()
        # Inside the isolation, because lazy layers draw their weights at the first forward pass.
        _check(model, name, domain)
    return model if front is None else fronted(front, model, domain, seed=seed)


def canonical(spec: str) -> str:
    """The one spelling of a spec that digests and rows use: options sorted, values in Python's short form.

    >>> canonical("vit: dim=64, depth=02")
    'vit:depth=2,dim=64'
    """
    front, behind = split_front(spec)
    name, _, options = factory_of(behind)
    model = join_spec(name, options)
    return model if front is None else fronted_spec(front, model)


def is_import_path(spec: str) -> bool:
    """Whether a spec names a user's factory rather than a registered model, whatever front stands before it.

    >>> is_import_path("mypackage.nets:small:width=3"), is_import_path("lenet:init=wide")
    (True, False)
    """
    module, _, rest = split_front(spec)[1].partition(":")
    factory = rest.partition(":")[0]
    return "." in module or (module not in MODELS and factory.replace(".", "_").isidentifier())


def example(module: nn.Module, domain: Domain) -> Tensor:
    """One example of zeros [1, ...] on the device and in the precision of the module."""
    like = next(module.parameters(), torch.empty(0))
    return torch.zeros(1, *domain.shape, device=like.device, dtype=like.dtype)


class Normalize(nn.Module):
    """Subtracts the domain's mean and divides by its standard deviation, without a change of shape.

    Models do it, so that everything outside of them works on inputs in [0, 1]. The two are non-persistent buffers:
    public constants of the domain, neither parameters nor part of a state dict.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, domain: Domain) -> None:
        super().__init__()
        mean, std = domain.moments()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


def initialised(model: M, init: Init) -> M:
    """The same model, with ``init=he`` in its layers: weights N(0, 2 / fan out) and zero biases (He et al., 2015).

    The last linear layer keeps PyTorch's initialisation, as do norms. This is what torchvision's ResNets have, and the
    public code of several papers.
    """
    if init == "he":
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        last = next((layer for layer in reversed(layers) if isinstance(layer, nn.Linear)), None)
        for layer in layers:
            if layer is not last:
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
    return model


def first_operation(domain: Domain, normalize: bool) -> nn.Module:
    """What a model does to its inputs first: normalise them, or nothing."""
    return Normalize(domain) if normalize else nn.Identity()


def is_small(domain: Images) -> bool:
    return max(domain.height, domain.width) <= SMALL_SIDE


def factory_of(spec: str) -> tuple[str, Callable[..., nn.Module], dict[str, Any]]:
    """The name of a model, what makes one of a domain and options, and the options of the spec."""
    if not is_import_path(spec):
        name, options = MODELS.parse(spec)
        return name, MODELS.get(name), options
    path, raw = split_spec(spec)
    if not path.partition(":")[2] or path.startswith(":"):
        raise GradveilError(
            f"cannot read {spec!r} as a model; write pkg.module:factory or pkg.module:factory:OPTION=VALUE"
        )
    target = import_object(path)
    if isinstance(target, nn.Module) or not callable(target):
        kind = type(target).__name__
        raise GradveilError(f"{path} is {kind}, not a function or class that builds a model; name one")
    takes_domain, known = _parameters(target, raw)

    def make(domain: Domain, **chosen: Any) -> nn.Module:
        try:
            built = target(domain, **chosen) if takes_domain else target(**chosen)
        except GradveilError:
            raise
        except Exception as error:
            raise GradveilError(f"model {path} could not be built: {in_one_line(error)}") from error
        if not isinstance(built, nn.Module):
            raise GradveilError(f"model {path} must give a torch.nn.Module, but gave {type(built).__name__}")
        return built

    return path, make, parse_options("model", path, known, raw)


def _parameters(target: Callable[..., Any], given: dict[str, str]) -> tuple[bool, dict[str, inspect.Parameter]]:
    """Whether a user's factory takes the domain, and its options.

    The domain goes to the first positional argument, unless that has a default of its own or is among the options:
    ``def net(domain, width=8)`` gets it, ``def net(width=8)`` and ``def net(*, width=8)`` do not. The type of an option
    is annotated, or that of its default, or whatever its text looks like.
    """
    try:
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):  # names only a type checker sees, or a callable without annotations
        hints = {}
    takes_domain, known = False, {}
    for index, p in enumerate(inspect.signature(target).parameters.values()):
        required = p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        if index == 0 and (p.kind is p.VAR_POSITIONAL or (required and p.name not in given)):
            takes_domain = True
        elif p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
            plain = type(p.default) if isinstance(p.default, (bool, int, float, str)) else _ANY_VALUE
            known[p.name] = p.replace(annotation=hints.get(p.name, plain))
        elif p.kind is p.VAR_KEYWORD:
            new = [key for key in given if key not in known]
            known |= {key: inspect.Parameter(key, p.KEYWORD_ONLY, default=None, annotation=_ANY_VALUE) for key in new}
    return takes_domain, known


def _check(model: nn.Module, name: str, domain: Domain) -> None:
    inputs = example(model, domain)
    try:
        with torch.no_grad():
            outputs = model(inputs)
    except Exception as error:
        raise GradveilError(f"model {name} cannot take inputs {list(inputs.shape)}: {in_one_line(error)}") from error
    if not isinstance(outputs, Tensor) or outputs.shape != (1, domain.classes):
        came = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise GradveilError(f"model {name} must give scores [1, {domain.classes}] for one input, but gave {came}")
    if not any(p.requires_grad for p in model.parameters()):
        raise GradveilError(f"model {name} has no trainable parameters, so there is no gradient to share")
