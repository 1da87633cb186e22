"""How models are called as they come: several inputs, outputs with logits, attention to differentiate twice."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves

from gradveil.core.errors import GradveilError
from gradveil.core.types import Params


class SeveralInputs:
    """The tensors of one call of a model, each [n, ...], where elsewhere one tensor of inputs stands.

    It is cut, moved and copied like a tensor, and passes through ``vmap``. Arguments that are None stay None.
    """

    def __init__(self, arguments: Sequence[Tensor | None], keywords: Mapping[str, Tensor | None]) -> None:
        self.arguments, self.keywords = tuple(arguments), dict(keywords)

    @property
    def tensors(self) -> list[Tensor]:
        return [one for one in (*self.arguments, *self.keywords.values()) if one is not None]

    def map(self, change: Callable[[Tensor], Tensor]) -> SeveralInputs:
        """The same call with every tensor changed."""
        arguments = [None if one is None else change(one) for one in self.arguments]
        return SeveralInputs(
            arguments, {name: None if one is None else change(one) for name, one in self.keywords.items()}
        )

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> SeveralInputs:
        return self.map(lambda one: one[index])

    def to(self, *place: Any) -> SeveralInputs:
        return self.map(lambda one: one.to(*place))

    def detach(self) -> SeveralInputs:
        return self.map(Tensor.detach)

    def clone(self) -> SeveralInputs:
        return self.map(Tensor.clone)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def requires_grad(self) -> bool:
        return any(one.requires_grad for one in self.tensors)

    @property
    def _version(self) -> tuple[int, ...]:
        return tuple(one._version for one in self.tensors)


_Form = tuple[tuple[bool, ...], tuple[tuple[str, bool], ...]]
"""Which arguments of a call are tensors, by position and by name."""


def _flattened(inputs: SeveralInputs) -> tuple[list[Any], _Form]:
    named = tuple((name, one is not None) for name, one in inputs.keywords.items())
    return inputs.tensors, (tuple(one is not None for one in inputs.arguments), named)


def _rebuilt(tensors: Any, form: _Form) -> SeveralInputs:
    left = iter(tensors)
    arguments = [next(left) if there else None for there in form[0]]
    return SeveralInputs(arguments, {name: next(left) if there else None for name, there in form[1]})


register_pytree_node(SeveralInputs, _flattened, _rebuilt, serialized_type_name="gradveil.SeveralInputs")


def tensors_of(inputs: object) -> list[Tensor]:
    """The tensor of inputs, or each of several."""
    if isinstance(inputs, SeveralInputs):
        return inputs.tensors
    return [inputs] if isinstance(inputs, Tensor) else []


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, by position and by name, that a model is called with."""
    if isinstance(inputs, SeveralInputs):
        return inputs.arguments, inputs.keywords
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def joined_inputs(inputs: Sequence[Any]) -> Any:
    """The examples of several calls, one after the other; raises a RuntimeError where their shapes differ."""
    calls = [one if isinstance(one, SeveralInputs) else SeveralInputs([one], {}) for one in inputs]
    tensors, forms = zip(*map(_flattened, calls), strict=True)
    if len(set(forms)) > 1:
        raise RuntimeError("these calls have different arguments")
    joined = _rebuilt([torch.cat(column) for column in zip(*tensors, strict=True)], forms[0])
    return joined if isinstance(inputs[0], SeveralInputs) else joined.tensors[0]


def zeros_like_one(inputs: Any) -> Any:
    """One example of zeros in the form of others, of which there may be none."""
    if isinstance(inputs, SeveralInputs):
        return inputs.map(zeros_like_one)
    return inputs.new_zeros(1, *inputs.shape[1:])


def logits_of(outputs: Any) -> Tensor:
    """The outputs [n, classes] of a model that returns them, or something with ``logits``, as ``transformers`` does."""
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise GradveilError(
            f"a model returns one tensor of outputs, or an object with logits, not {type(outputs).__name__}: "
            "wrap it in a module that picks one"
        )
    return found


def returned_tensors(outputs: Any) -> list[Tensor]:
    """All tensors that a model returned: logits, and maybe hidden states or a loss that it computed itself."""
    if isinstance(outputs, Mapping):
        outputs = dict(outputs)
    elif not isinstance(outputs, Tensor | tuple | list):  # logits may be a property, or in slots
        outputs = {**getattr(outputs, "__dict__", {}), "logits": getattr(outputs, "logits", None)}
    return [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]


def with_logits(outputs: Any, logits: Tensor) -> Any:
    """The outputs of a model with other logits in their place."""
    if isinstance(outputs, Tensor):
        return logits
    if isinstance(outputs, tuple):
        return outputs._replace(logits=logits)  # type: ignore[attr-defined]
    changed = copy.copy(outputs)
    if isinstance(changed, Mapping):
        changed["logits"] = logits  # type: ignore[index]
        return changed
    try:
        object.__setattr__(changed, "logits", logits)  # that of a frozen dataclass too
    except AttributeError:  # it is computed of something else
        return SimpleNamespace(logits=logits)
    return changed


def as_pictures(inputs: Any) -> Any:
    """Images of bytes, uint8 [n, C, H, W], as numbers in [0, 1]; anything else as it is."""
    if not isinstance(inputs, Tensor) or inputs.dtype != torch.uint8:
        return inputs
    if inputs.dim() != 4:
        return inputs  # token ids, say
    if inputs.shape[1] > 4 and inputs.shape[3] <= 4:
        raise GradveilError(
            f"images are [n, channels, height, width], not {'x'.join(map(str, inputs.shape))}: call permute(0, 3, 1, 2)"
        )
    return inputs.float() / 255


class _PlainAttention:
    """Sets switches of torch that all threads share: the first that enters sets them, the last puts them back."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: list[bool] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = [read() for read, _, _ in _SWITCHES]
                for _, switch, plain in _SWITCHES:
                    switch(plain)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for (_read, switch, _plain), before in zip(_SWITCHES, self._before, strict=True):
                    switch(before)


_cuda, _mha = torch.backends.cuda, torch.backends.mha
_SWITCHES: list[tuple[Callable[[], bool], Callable[[bool], None], bool]] = [
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp, True),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp, False),  # that of the CPU too
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp, False),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp, False),
    (_mha.get_fastpath_enabled, _mha.set_fastpath_enabled, False),
]
_plain_attention = _PlainAttention()


def twice_differentiable() -> AbstractContextManager[None]:
    """A context in which torch takes attention apart: its fused kernels have no second derivative and no vmap.

    Layers of ``torch.nn`` in eval mode have a shortcut of their own, which has not even a first one. It takes some
    microseconds; a compiler that traces the model does without, for it takes no locks.
    """
    return nullcontext() if torch.compiler.is_compiling() else _plain_attention


def trained_parameters(module: nn.Module) -> Params:
    """Copies of the parameters that are not frozen, by name, tied ones once: what a client trains and sends."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
