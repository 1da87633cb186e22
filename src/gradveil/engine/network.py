"""All problems as one ordinary batch through the weights they share.

Problems that start from one broadcast differ in their inputs, not in the network. So one forward and one backward pass
of a batch serves all of them, with plain convolutions at full speed, and only the gradients in the parameters are taken
problem by problem, layer by layer (``rules``). With v the derivative of the objective in the gradient, its derivative
in the inputs is that of <v, gradient(inputs)>, which the same layer rules give without forming the gradient again.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, KeysView
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.types import Loss, Params
from gradveil.engine import rules
from gradveil.models import AddsToLoss, logits_of, twice_differentiable


class UnsupportedError(Exception):
    """A model that the layer rules do not cover; the reason is for a person."""


@dataclass(frozen=True)
class LayerCall:
    """One pass of the batch through one layer, or the use of one loose parameter (then without layer and inputs)."""

    name: str
    layer: nn.Module | None
    inputs: Tensor | None
    output_gradient: Tensor
    """Of the loss in what left the layer."""

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters whose gradient this is a part of, by the name that the layer has for each."""
        if self.layer is None:
            return {"": self.name}
        return {name: _path(self.name, name) for name, _ in self.layer.named_parameters(recurse=False)}


@dataclass(frozen=True)
class LayerPass:
    """One forward and backward pass of N problems: what their gradients are made of."""

    network: SharedNetwork
    """What they went through: for more passes."""
    outputs: Tensor
    """[N, B, classes]."""
    calls: list[LayerCall]
    problems: int


class SharedNetwork:
    """A module at fixed parameters, watched: it gives outputs, and gradients in its parameters problem by problem.

    A loose parameter, such as a class token or positions, belongs to no layer with a rule. If its first axis, of length
    1, stands for the batch, every example gets its own copy, and the gradient in the copies is its gradient.
    """

    def __init__(self, module: nn.Module, sent: Params, *, train_mode: bool | None) -> None:
        self._module = _copied(module, sent)
        if train_mode is not None:  # else every layer stays in the mode it is in
            self._module.train(train_mode)
        for name, layer in list(self._module.named_modules()):
            if isinstance(layer, _BatchNorm):
                statistics_of_batch = layer.training or layer.running_mean is None
                norm = rules.ProblemBatchNorm(layer) if statistics_of_batch else rules.FixedNorm(layer)
                self._module.set_submodule(name, norm)
            if getattr(layer, "inplace", False) is True:  # it would edit what was watched of the layer before
                layer.inplace = False
        self._adding = [layer for layer in self._module.modules() if isinstance(layer, AddsToLoss)]
        self._problems = 1
        self._watched: list[tuple[str, nn.Module | None, Tensor | None, Tensor]] = []
        """Name, layer, inputs and outputs of each call in the pass that is under way."""
        self._loose: list[tuple[nn.Module, str, str, Tensor]] = []
        covered: set[str] = set()
        for name, layer in list(self._module.named_modules()):
            every = dict(layer.named_parameters(recurse=False))
            own = {key: p for key, p in every.items() if p.requires_grad or _path(name, key) in sent}
            if own and len(own) < len(every):
                raise UnsupportedError(f"layer {name} is frozen in part")
            covered.update(_path(name, key) for key in own)
            if own and rules.supports(layer):
                layer.register_forward_hook(self._watch(name, layer))
            else:
                for key, parameter in own.items():
                    self._copy_per_example(name, layer, key, parameter)
        self._module.requires_grad_(False)
        if covered != sent.keys():
            raise UnsupportedError("parameters are shared between layers or not all broadcast")

    def _copy_per_example(self, name: str, layer: nn.Module, key: str, parameter: Tensor) -> None:
        if parameter.dim() < 3 or parameter.shape[0] != 1:
            raise UnsupportedError(f"layer {name or 'top'} ({type(layer).__name__}) has no gradient rule")
        delattr(layer, key)
        self._loose.append((layer, key, _path(name, key), parameter.detach()))

    def _watch(self, name: str, layer: nn.Module):  # type: ignore[no-untyped-def]
        def hook(_layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            if not inputs or inputs[0].dim() < 2 or len(inputs[0]) % self._problems:
                raise UnsupportedError(f"layer {name} is not given rows of all examples, one after another")
            self._watched.append((name, layer, inputs[0], outputs))

        return hook

    def differentiate(
        self, loss: Loss, inputs: Tensor, targets: Tensor, buffers: Params | None = None, *, again: bool = False
    ) -> LayerPass:
        """Outputs for inputs [N, B, ...], and the gradient of each problem's loss in what left every layer.

        Args:
            loss: of one problem.
            inputs: need a gradient.
            targets: [N, B] or [N, B, classes].
            buffers: [N, B, ...] by name, those that each example has of its own, such as what a client drew.
            again: what comes of the pass can be differentiated once more.
        """
        problems = self._problems = len(inputs)
        for path, values in (buffers or {}).items():
            place, _, key = path.rpartition(".")
            setattr(self._module.get_submodule(place), key, values.flatten(0, 1))
        flat = inputs.flatten(0, 1)
        self._watched = []
        self._normalise_each_of(problems)
        for layer, key, name, parameter in self._loose:
            copies = parameter.expand(len(flat), *parameter.shape[1:]).clone().requires_grad_()
            setattr(layer, key, copies)
            self._watched.append((name, None, None, copies))
        with twice_differentiable():
            outputs = rules.split_problems(logits_of(self._module(flat)), problems)
        losses = vmap(loss)(outputs, targets)
        return LayerPass(self, outputs, self._calls(self._total(losses), again), problems)

    def _normalise_each_of(self, problems: int) -> None:
        for layer in self._module.modules():
            if isinstance(layer, rules.ProblemBatchNorm):
                layer.problems = problems

    def _total(self, losses: Tensor) -> Tensor:
        """The sum over problems of their losses [N] and of what layers added in the last pass: means over examples."""
        return torch.stack([losses.sum(), *(len(losses) * layer.pop_term() for layer in self._adding)]).sum()

    def _calls(self, loss: Tensor, again: bool) -> list[LayerCall]:
        """What was watched in this pass, with the gradients of the loss."""
        watched, self._watched = self._watched, []
        found = torch.autograd.grad(
            loss, [outputs for *_, outputs in watched], create_graph=again, allow_unused=True, materialize_grads=True
        )  # what leaves a layer may be thrown away: its parameters then have a gradient of zero
        return [LayerCall(*call[:3], gradient) for call, gradient in zip(watched, found, strict=True)]


class SeparateNetwork(SharedNetwork):
    """The same with nothing between problems: each passes under ``vmap``, where no code can mix it with another.

    A model may scale a whole batch by its largest entry, or put positions before examples. No test on a few inputs
    rules that out for others. Here it stays within one problem, and what the layer rules make of a problem depends on
    that problem alone, even where they are wrong about it.
    """

    def _watch(self, name: str, layer: nn.Module):  # type: ignore[no-untyped-def]
        def note(x: Tensor, y: Tensor) -> None:
            self._watched.append((name, layer, x, y))

        def hook(_layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
            if not inputs or inputs[0].dim() < 2:
                raise UnsupportedError(f"layer {name} is not given rows")
            watched: Tensor = _Watched.apply(inputs[0], outputs, note)  # type: ignore[no-untyped-call]
            return watched

        return hook

    def differentiate(
        self, loss: Loss, inputs: Tensor, targets: Tensor, buffers: Params | None = None, *, again: bool = False
    ) -> LayerPass:
        """The same; inputs need no gradient, and factors come in float32 or better though a model may use less."""
        if buffers:
            raise UnsupportedError("examples have buffers of their own")
        copies = {
            name: parameter.expand(*inputs.shape[:2], *parameter.shape[1:]).clone().requires_grad_()
            for _, _, name, parameter in self._loose
        }

        def one(x: Tensor, target: Tensor, own: Params) -> tuple[Tensor, Tensor]:
            for layer, key, name, _ in self._loose:
                setattr(layer, key, own[name])
            outputs = logits_of(self._module(x))
            return outputs, self._total(loss(outputs, target)[None])

        self._watched = [(name, None, None, own) for name, own in copies.items()]
        self._normalise_each_of(1)  # under vmap there is one, and for the rules, outside of it, there are all
        with twice_differentiable():
            outputs, losses = vmap(one)(inputs, targets, copies)
        self._normalise_each_of(len(inputs))
        flat = [
            LayerCall(
                call.name, call.layer, None if call.inputs is None else _rows(call.inputs), _rows(call.output_gradient)
            )
            for call in self._calls(losses.sum(), again)
        ]
        return LayerPass(self, outputs, flat, len(inputs))


class _Watched(Function):
    """What came into a layer and what left it, [N, ...] each, noted from under ``vmap``; the latter goes on."""

    @staticmethod
    def forward(_x: Tensor, _y: Tensor, _note: Callable[[Tensor, Tensor], None]) -> Tensor:
        raise UnsupportedError("a layer is given the same for all examples")  # else vmap would call the rule below

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: gradients are taken on what the rule below returns."""

    @staticmethod
    def vmap(
        _info: Any, places: tuple[int | None, ...], x: Tensor, y: Tensor, note: Callable[[Tensor, Tensor], None]
    ) -> tuple[Tensor, int]:
        if places[0] is None or places[1] is None:
            raise UnsupportedError("a layer is given the same for all examples")
        x, y = x.movedim(places[0], 0), y.movedim(places[1], 0)
        if not y.requires_grad:  # neither the inputs nor the weights need a gradient, but what leaves the layer does
            y = y.detach().requires_grad_()
        note(x, y)
        return y, 0


def _rows(x: Tensor) -> Tensor:
    """[N, rows, ...] as [N * rows, ...]; sums over examples in half precision would lose small parts."""
    return x.flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32))


def gradients(passed: LayerPass, only: KeysView[str] | None = None) -> Params:
    """The gradient of each problem in all parameters, or in those of ``only`` some layers, [N, ...] by name."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for call in passed.calls:
        own = set(call.parameters.values())
        if only is not None and not only & own:
            continue
        if only is not None and not own <= only:
            raise UnsupportedError("a reply holds a part of a layer")
        if call.layer is None or call.inputs is None:
            found[call.name].append(_summed(call, passed.problems))
        else:
            each = rules.gradients(call.layer, call.inputs, call.output_gradient, passed.problems)
            for name, tensor in each.items():
                found[_path(call.name, name)].append(tensor)
    return {name: tensors[0] if len(tensors) == 1 else torch.stack(tensors).sum(0) for name, tensors in found.items()}


def along(passed: LayerPass, direction: Params) -> Tensor:
    """The sum over problems of <gradient, direction>, differentiable in what passed through the layers.

    Layers that ``direction`` does not name count nothing.
    """
    parts = []
    for call in passed.calls:
        if not direction.keys() & set(call.parameters.values()):
            continue
        if call.layer is None or call.inputs is None:
            parts.append((_summed(call, passed.problems) * direction[call.name]).sum())
        else:
            own = {name: direction[whole] for name, whole in call.parameters.items()}
            parts.append(rules.along(call.layer, call.inputs, call.output_gradient, passed.problems, own))
    return torch.stack(parts).sum()


def _summed(call: LayerCall, problems: int) -> Tensor:
    """The gradient in every example's copy of a parameter, added up within each problem: [N, 1, ...]."""
    return rules.split_problems(call.output_gradient, problems).sum(dim=1, keepdim=True)


def _path(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def without_outputs(module: nn.Module) -> dict[int, Any]:
    """A memo for ``deepcopy`` with which copies forget the outputs of a pass before: those cannot be copied."""
    attributes = [value for layer in module.modules() for value in vars(layer).values()]
    outputs = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    return {id(value): value.new_empty(0) for value in outputs}


def _copied(module: nn.Module, sent: Params) -> nn.Module:
    """The one copy of a module that a network makes: with these parameters, which it does not share with anybody."""
    memo = without_outputs(module)
    for name, parameter in module.named_parameters():
        if name in sent:
            own = torch.empty_like(parameter, requires_grad=False).copy_(sent[name].detach())
            memo[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)
