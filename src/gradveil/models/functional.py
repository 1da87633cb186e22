"""A module as a pure function of its parameters: what clients train, attacks differentiate and engines batch."""

from __future__ import annotations

import copy
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from gradveil.core.errors import GradveilError
from gradveil.core.trees import detached
from gradveil.core.types import Loss, Params
from gradveil.models.calls import arguments_of, logits_of, trained_parameters, twice_differentiable

_RATE = re.compile(r"dropout|drop_(path|prob|rate)")


class AddsToLoss(nn.Module):
    """A layer with a term of its own in the loss, which its forward pass leaves in ``term``: a mean over examples."""

    term: Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        """Copies leave the term of the last forward pass behind: a tensor inside a graph cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name != "term"}

    def pop_term(self) -> Tensor:
        """The term of the last forward pass, let go so that it outlives no transform."""
        term, self.term = self.term, None
        if term is None:
            raise GradveilError(f"{type(self).__name__} adds to the loss, but no forward pass went through it")
        return term


class Functional:
    """``outputs = f(params, inputs)`` for one module; safe under vmap, grad and jvp.

    Works on a deep copy: the given module is never edited. In train mode, layers with running statistics use those of
    the batch and forget the running ones, whose in-place update no transform allows. Dropout is refused there: an
    attack that repeats the client's step cannot repeat a draw made inside it. With ``train_mode=None`` every layer
    stays in the mode it is in, and dropout is off: that of layers which have a rate, not that of code which calls it.
    """

    def __init__(self, module: nn.Module, *, train_mode: bool | None = False) -> None:
        self._module = copy.deepcopy(module)
        if train_mode is not None:
            self._module.train(train_mode)
        for name, layer in self._module.named_modules():
            rates = _dropout_rates(layer)
            if train_mode and rates:
                raise GradveilError(
                    f"layer {name!r} drops out at random, which no attack can repeat: "
                    "set its rate to 0 or use eval mode"
                )
            for rate in rates if train_mode is None else ():
                setattr(layer, rate, 0.0)  # some models read the rate of a layer and call dropout themselves
            if train_mode is None and isinstance(layer, _DropoutNd):
                layer.eval()
            if isinstance(layer, _NormBase) and layer.training and layer.track_running_stats:
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        self._adding = [layer for layer in self._module.modules() if isinstance(layer, AddsToLoss)]
        self.params: Params = trained_parameters(self._module)
        """Detached copies of the parameters that are trained, tied ones once."""
        self.frozen: Params = detached({n: p for n, p in self._module.named_parameters() if n not in self.params})
        """Those of the others, which are constants like the buffers unless a call has other values for them."""
        self.buffers: Params = detached(dict(self._module.named_buffers()))
        """Detached copies of its buffers, such as running statistics in eval mode."""

    def __call__(self, params: Params, inputs: Tensor) -> Tensor:
        """Outputs [n, classes] of the module at ``params``, which must hold every parameter by name but frozen ones.

        ``inputs`` is a tensor, or :class:`SeveralInputs` in its place.
        """
        call = ((inputs,), None) if isinstance(inputs, Tensor) else arguments_of(inputs)
        given = {**self.frozen, **params} if self.frozen else params
        # strict: a parameter that is left out would otherwise silently keep its initial value
        try:
            with twice_differentiable():
                outputs = functional_call(self._module, (given, self.buffers), *call, strict=True)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise GradveilError(
                "batch norm in train mode takes no single values, here those of one example: use train_mode=false, "
                "mini-batches that leave no example alone, or torch.nn.GroupNorm"
            ) from error
        return logits_of(outputs)

    @property
    def module(self) -> nn.Module:
        """The copy that is evaluated, for looking at its layers; its own parameters are not those in use."""
        return self._module

    def loss(self, loss: Loss, params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        """``loss(outputs, targets)`` plus what layers add to it themselves: what a client minimises."""
        total = loss(self(params, inputs), targets)
        for layer in self._adding:
            total = total + layer.pop_term()
        return total

    def with_buffers(self, buffers: Params) -> Functional:
        """The same function with other values of some of its buffers."""
        other = copy.copy(self)
        other.buffers = {**self.buffers, **buffers}
        return other


def _dropout_rates(layer: nn.Module) -> list[str]:
    """The names of its rates of dropout above 0: that of a layer of dropout, or those of attention and an LSTM."""
    rates = {name: value for name, value in vars(layer).items() if _RATE.search(name) and isinstance(value, float)}
    if isinstance(layer, _DropoutNd):
        rates["p"] = float(layer.p)
    return [name for name, rate in rates.items() if rate > 0]


_OF_ALL = vars(nn.Module()).keys() - {"training"}
"""What torch keeps in every layer, but for the mode that it is in."""


class Mirror:
    """A live module as a function: in the modes that a loop put its layers into, with the buffers that it has now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        try:
            self._copy = copy.deepcopy(module)
        except RuntimeError as error:
            raise GradveilError(
                "the model cannot be copied: take nn.utils.parametrizations.weight_norm, not nn.utils.weight_norm, "
                f"and keep no outputs in the model ({str(error).splitlines()[0][:80]})"
            ) from error
        self._functions: dict[tuple[bool, ...], Functional] = {}
        self._replaced: str | None = None
        self._noted = _attributes(module)
        self._lock = threading.Lock()
        self._passes = Counter[int]()
        """How many passes are under way in each thread."""

    def note(self) -> None:
        """After a pass: what the pass itself set, which may tell of its examples, is not for the copy."""
        with self._lock:
            self._noted = _attributes(self._module)
            self._passes -= Counter([threading.get_ident()])

    def settle(self) -> None:
        """No pass is under way in this thread: one that began and did not end has failed."""
        with self._lock:
            self._passes.pop(threading.get_ident(), None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """While a part of a pass may run again, or a loss: what that sets is not for the copy either."""
        with self._lock:
            self._passes[threading.get_ident()] += 1
        before = _attributes(self._module)
        try:
            yield
        finally:
            after = _attributes(self._module)
            with self._lock:
                self._noted |= {key: value for key, value in after.items() if _differ(before, key, value)}
                self._passes -= Counter([threading.get_ident()])

    def follow(self) -> str | None:
        """Before a pass: give the copy the numbers, texts and flags that were set on layers since the last one.

        Returns why the copy cannot follow, if it cannot: a layer was replaced, or such an attribute by something else.
        """
        with self._lock:
            now, alive = _attributes(self._module), {thread.ident for thread in threading.enumerate()}
            if self._passes.keys() & alive:
                self._noted = now  # nobody can tell what a pass that failed, or is under way, set from what a loop did
            self._passes[threading.get_ident()] += 1
            odd = [key for key, kind in now.items() if isinstance(kind, type) and self._noted.get(key) is not kind]
            odd += [key for key, value in self._noted.items() if key not in now and value is not None]
            if odd and self._replaced is None:
                name = ".".join(filter(None, odd[0]))
                self._replaced = f"{name!r} was replaced, and this defense works on a copy: protect the model again"
            set_since = {key: value for key, value in now.items() if _differ(self._noted, key, value)}
            for (place, name), value in set_since.items() if self._replaced is None else ():
                setattr(self._copy.get_submodule(place), name, value)
                for function in self._functions.values():
                    layer = function.module.get_submodule(place)
                    if name != "training" and not (
                        _RATE.search(name) or (name == "p" and isinstance(layer, _DropoutNd))
                    ):  # it stays off
                        setattr(layer, name, value)
        return self._replaced

    def function(self, *, followed: bool = True) -> Functional:
        """Dropout is off in it. Without ``follow`` before it, layers are in the modes that they are in now."""
        modes = tuple(layer.training for layer in (self._copy if followed else self._module).modules())
        if modes not in self._functions:
            for layer, mode in zip(self._copy.modules(), modes, strict=True):
                layer.training = mode
            self._functions[modes] = Functional(self._copy, train_mode=None)
        plain = self._functions[modes]
        return plain.with_buffers({n: b for n, b in self._module.named_buffers() if n in plain.buffers})


def _attributes(module: nn.Module) -> dict[tuple[str, str], object]:
    """The type of each layer, and its numbers, texts and flags, by the layer's place and the attribute's name."""
    plain, found = (bool, int, float, str, type(None)), dict[tuple[str, str], object]()
    for place, layer in module.named_modules():
        found[place, ""] = type(layer)
        found |= {(place, n): v for n, v in vars(layer).items() if n not in _OF_ALL and isinstance(v, plain)}
    return found


def _differ(before: Mapping[tuple[str, str], object], key: tuple[str, str], value: object) -> bool:
    """Whether there is a new value under this key. NaN is no new value where NaN was."""
    return key not in before or not (
        before[key] is value or before[key] == value or (_nan(before[key]) and _nan(value))
    )


def _nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def set_buffers(module: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    """Put tensors in the place of buffers, by name."""
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, value)
