"""A defense around a user's own training loop, on one invariant:

the parameters that leave are the broadcast plus the steps that the guard defended.

The guard knows what the parameters must be, bit for bit. It compares when it takes a loss, before every step and before
an update leaves, and refuses by name what moved otherwise. It also keeps the gradients that ``guard.loss`` gave, and a
step uses no others. Hooks on optimizers only make an error come earlier.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from gradveil.bounds import Certificate, certificate
from gradveil.client.guarded import (
    Cut,
    Hook,
    Pass,
    changed_buffers,
    check_arguments,
    check_loss,
    inputs_of_call,
    joined,
    refuse,
    remove_ghosts,
)
from gradveil.client.past import Past
from gradveil.client.sampling import Draws, Examples
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import detached, differing, digests, is_plain, scaled, subtract
from gradveil.core.types import Loss, Params
from gradveil.defenses import DEFENSES, Defense, Log, Step, check_result, defended_step, links_of
from gradveil.engine import copied_loss
from gradveil.models import (
    AddsToLoss,
    Functional,
    Mirror,
    arguments_of,
    logits_of,
    returned_tensors,
    set_buffers,
    with_logits,
    zeros_like_one,
)

_TREES = ("parameters", "broadcast", "buffers", "trained_buffers")
_UNFIT = (torch.optim.LBFGS, torch.optim.SparseAdam)
_CHECKPOINT = {*_TREES, "round", "step", "run", "history", "defense", "optimizers"}
_lock = threading.Lock()
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
_left: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
"""What optimizers remembered when a guard let go of them: defended gradients and nothing else."""


def protect(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], loss: Loss, *, defense: str | Defense
) -> Guard:
    """Put a defense between ``loss.backward()`` and ``optimizer.step()``. What the model holds now is the broadcast.

    Args:
        model: takes tensors of inputs, with a row for each example, and returns one tensor of outputs or an object
            with ``logits``. Frozen parameters stay as they are, and no update holds them.
        optimizer: all optimizers that step the model.
        loss: the mean over the examples, as a function of outputs and targets.
        defense: a defense, or its name with options, such as ``"dp:sigma=1.1"``.

    Returns:
        A guard. Compute the loss with ``guard.loss`` in the loop, and send ``guard.update()``.

    Raises:
        GradveilError: if the defense cannot work here; later, wherever an update would leave undefended.
    """
    built = DEFENSES.build(defense) if isinstance(defense, str) else defense
    if isinstance(built, Defense) and (late := [link for link in links_of(built) if link.changes_updates]):
        refuse(f"{type(late[0]).__name__} changes what is sent and not the steps: use gradveil.Client")
    several = isinstance(optimizer, Sequence)
    return Guard(model, cast(Sequence[Optimizer], optimizer if several else [optimizer]), loss, built)


class Guard:
    """A training loop under a defense. Leave its ``with`` block, or ``close()`` it, to take the defense off again."""

    _kept: Params
    """What the parameters must be: the broadcast plus the defended steps."""
    _broadcast: Params
    _buffers: Params
    """The model's buffers as the server sent them."""
    _prepared: Defense | None
    _update: Params | None
    _pending: list[Pass]
    _step: int
    _shared: dict[str, str]
    """For each name of a buffer the first name of the same one."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], loss: Loss, defense: Defense) -> None:
        with _lock:
            guarded = {id(p) for guard in _guards for p in guard._params.values()}
        check_arguments(model, loss, defense, guarded)
        self._past = Past.of(model)
        self.log = Log(self._past.ledger)
        """What the defense reported, such as how often it fell back, and its ledger of privacy."""
        self._model, self._loss, self._defense, self._rng = model, loss, defense, Stream.secret()
        self._params: Params = dict(model.named_parameters())
        self._starts_over = any(link.recomputes_gradient for link in links_of(defense))
        self._guaranteed = any(link.has_guarantee for link in links_of(defense))
        self._mirror = Mirror(model)
        self._anchor = torch.zeros((), requires_grad=True)
        self._states: dict[Optimizer, list[Any]] = {}
        self._optimizer_hooks: list[tuple[Any, Any]] = []
        self._draws = Draws(self._rng)
        self._looked: set[Optimizer] = set()
        self._ever = False
        self._taking, self._stepping, self._round, self._replaced = False, 0, 0, Params()
        first = {id(buffer): name for name, buffer in model.named_buffers()}
        self._shared = {n: first[id(b)] for n, b in model.named_buffers(remove_duplicate=False)}
        self._buffers = {name: self._past.served(buffer) for name, buffer in model.named_buffers()}
        self._begin(broadcast={})
        self.use(*optimizers)
        before, after = Hook(self._before_forward), Hook(self._after_forward)
        self._hooks = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
        with _lock:
            _guards.add(self)

    def use(self, *optimizers: Optimizer) -> None:
        """Step the model with these optimizers from now on, such as one that was made anew for a round."""
        states = {}
        for optimizer in optimizers or [None]:
            while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
                optimizer = inner  # of a wrapper, which steps this one
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, _UNFIT):
                refuse("a guard takes torch optimizers that step without a closure, such as SGD or Adam")
            self._held(optimizer)
            states[optimizer] = memory = _memory(optimizer)
            kept = [s for s in optimizer.state.values() if not (isinstance(s, dict) and float(s.get("step", 1)) == 0)]
            fresh = not any(leaf.any() for leaf in tree_leaves(kept) if isinstance(leaf, Tensor))
            if not fresh and memory not in (_left.get(optimizer), self._states.get(optimizer)):
                refuse("the optimizer remembers gradients that no guard defended (momentum, say): make it anew")
        self._let_go()
        self._states = states
        look, after = self._last_look, self._after_step
        self._optimizer_hooks = [(o.register_step_pre_hook(look), o.register_step_post_hook(after)) for o in states]

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss given to :func:`protect`, plus what layers of the model add to it. Only its gradient is stepped.

        ``outputs`` is what the model returned: a tensor, or an object with ``logits``, which are then taken.
        """
        if not isinstance(targets, Tensor):
            refuse("guard.loss takes one tensor of outputs, or an object with logits, and one of targets")
        outputs = logits_of(outputs)
        adding = [layer for layer in self._model.modules() if isinstance(layer, AddsToLoss) and layer.term is not None]
        self._mirror.settle()
        # Poisson sampling may draw no examples: their loss is 0, and so is its gradient
        loss = copied_loss(self._loss) if self._starts_over else self._loss  # which may remember examples
        with self._mirror.again() if self._starts_over else nullcontext():
            total = loss(outputs, targets) if len(targets) else outputs.sum()
        total = sum((layer.pop_term() for layer in adding if len(targets)), start=total)
        if not (torch.is_grad_enabled() and total.requires_grad):
            return total
        self._ready("guard.loss")
        if total.dim():
            refuse("the loss is a mean over the examples, one number: this one has a number for each of them")
        seen = next((each for each in self._pending if each.outputs() is outputs), None)
        if seen is None or outputs._version != seen.version:
            refuse("guard.loss takes what the guarded model returned, as it is, once: the rest belongs in the loss")
        self._pending.remove(seen)
        if seen.moved:
            refuse(seen.moved)
        if len(targets) and self._starts_over:
            check_loss(self._loss, outputs.detach(), targets)
        for name, p in self._params.items():
            if getattr(p, "_post_accumulate_grad_hooks", None):
                refuse(f"parameter {name!r} is stepped in the backward pass (post-accumulate hook): step after it")
        for tensor in [held() for held in seen.returned]:
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(self._outside)  # type: ignore[no-untyped-call]
        seen.targets, seen.versions = targets.detach(), (seen.inputs._version, targets._version)
        cut = partial(Cut.apply, self._anchor, total.detach())
        return cast(Tensor, cut(partial(self._take, seen, total)))

    def update(self) -> Params:
        """What may leave: the difference to the broadcast, by name. It ends the round; asked again, it is the same.

        Only parameters: running statistics are of the private examples, and no defense covers them.
        """
        if self._update is None:
            self._compare("guard.update")
            if self._step == 0:
                refuse("no step of this round went through the guard: there is no update (did a copy train?)")
            kept, before = self._kept, self._broadcast  # what is frozen and did not move is not sent
            names = [n for n, p in self._params.items() if p.requires_grad or not torch.equal(kept[n], before[n])]
            change = subtract({n: kept[n] for n in names}, {n: before[n] for n in names})
            sent = (self._prepared or self._defense).on_update(change, self._rng, self.log)
            check_result(sent, change)
            self._update = detached(sent)
            self._past.note(dict(self._model.named_buffers()), self._buffers)
        return detached(self._update)

    def state_dict(self, *, statistics: bool = False) -> Params:
        """The broadcast plus the update, with the broadcast's buffers, for servers that take parameters.

        ``statistics`` sends buffers as training left them. No defense covers those: they may name the examples.
        """
        update, named = self.update(), {id(p): name for name, p in self._params.items()}
        own = {name: named[id(p)] for name, p in self._model.named_parameters(remove_duplicate=False)}  # tied ones too
        now = {n: t + update[n] if n in update else t for n, t in self._broadcast.items()}
        sent = {name: now[first] for name, first in own.items()}
        buffers = dict(self._model.named_buffers()) if statistics else self._buffers
        state = self._model.state_dict()  # without buffers that are not persistent
        return detached(sent | {n: buffers[one] for n, one in self._shared.items() if one in buffers and n in state})

    def gradient(self) -> Params:
        """The defended gradient by name, for loops that send gradients: before the step ``p.grad`` is still bare."""
        self._ready("guard.gradient")
        self._compare("guard.gradient")
        if not self._compare_gradients("guard.gradient"):
            refuse("there is no gradient: call backward() on guard.loss first")
        self._defend(next(iter(self._states)))
        return detached(self._gradients)

    def new_round(self, broadcast: Mapping[str, Tensor]) -> None:
        """Load what the server sent, parameters and maybe buffers by name. Defenses prepare anew."""
        self._ready("guard.new_round", after_update=True)
        own = self._model.state_dict()
        needed = {n for n, p in self._params.items() if p.requires_grad} | set(self._update or {})
        if not isinstance(broadcast, Mapping) or not needed <= broadcast.keys() <= own.keys():
            refuse(
                "a broadcast maps all names of the model's parameters, and at will those of frozen ones and of its "
                "buffers, to tensors"
            )
        if moved := differing(self._params, {n: kept for n, kept in self._kept.items() if n not in broadcast}):
            refuse(
                f"parameter {moved[0]!r} moved without the guard, and is not in the broadcast: the server has another"
            )
        states = {n for n in broadcast if n.rpartition(".")[2] == "_extra_state"}  # of layers, not tensors
        broadcast = {n: sent for n, sent in broadcast.items() if n not in states}
        for name, sent in broadcast.items():
            whole = name not in self._params and isinstance(sent, Tensor) and sent.dtype == own[name].dtype
            if not (is_plain(sent) or whole) or sent.is_meta or sent.shape != own[name].shape:
                refuse(f"the broadcast has no usable {name!r}: it has another shape, or no finite real numbers")
        # statistics of this client's own training, with which a loop completed a broadcast, are not the server's
        self._past.note(dict(self._model.named_buffers()), self._buffers)
        mine = {n for n in broadcast if n not in self._params and self._past.is_own(broadcast[n].to(own[n]))}
        self._model.load_state_dict(broadcast, strict=False)
        self._begin({n: sent for n, sent in broadcast.items() if n not in mine})

    def sample(self, dataset: Examples, rate: float, steps: int | None = None) -> Iterator[tuple[Any, Tensor]]:
        """Poisson batches, for one step each: only such steps count at a rate below 1 (:class:`Draws`)."""
        return self._draws.batches(dataset, rate, steps)

    def privacy_spent(self, delta: float) -> float:
        """Epsilon of all that left, rounds and restarts included; infinite for a defense without a proof."""
        if self._defense.delta is None:
            return math.inf if self._ever else 0.0
        return self.log.ledger.spent(delta)

    def certificate(self) -> Certificate:
        """What is proved of all replies, those that are planned included. A GradveilError says why nothing is."""
        return certificate(self._defense, self.log.ledger)

    def checkpoint(self) -> dict[str, Any]:
        """All that :meth:`restore` needs. ``torch.save`` writes it, and ``torch.load(weights_only=True)`` reads it."""
        self._compare("guard.checkpoint")
        trees = (self._kept, self._broadcast, self._buffers, dict(self._model.named_buffers()))
        return {name: detached(tree) for name, tree in zip(_TREES, trees, strict=True)} | {
            "round": self._round, "step": self._step, "defense": repr(links_of(self._defense)),
            "run": self.log.ledger.run, "history": self.log.ledger.history(),
            "optimizers": [(type(one).__name__, copy.deepcopy(one.state_dict())) for one in self._states],
        }  # fmt: skip

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: after a restart, or back at the best epoch. Privacy that was spent stays spent.

        It holds the model and the optimizers too. It is a file of your own: what is in it is trusted. Take one before
        each reply leaves: what a process spent after its last checkpoint is forgotten when it dies.
        """
        self._ready("guard.restore", after_update=True)
        if not isinstance(checkpoint, Mapping) or checkpoint.keys() != _CHECKPOINT:
            refuse("guard.restore takes what guard.checkpoint gave")
        self.log.ledger.recall(checkpoint["history"])  # first: whatever fails below, what was spent stays spent
        kinds = [kind for kind, _ in checkpoint["optimizers"]]
        if checkpoint["defense"] != repr(links_of(self._defense)) or kinds != [type(o).__name__ for o in self._states]:
            refuse("the checkpoint is of another defense, or of other optimizers")
        live = [dict(self._params), dict(self._params), self._buffers, dict(self._model.named_buffers())]
        shapes = [{name: tensor.shape for name, tensor in checkpoint[tree].items()} for tree in _TREES]
        if shapes != [{name: tensor.shape for name, tensor in tree.items()} for tree in live]:
            refuse("the checkpoint is of another model")
        if self._update is not None and (checkpoint["run"], checkpoint["round"]) == (self.log.ledger.run, self._round):
            refuse("the update of this round has left, and a round has one: call guard.new_round(broadcast)")
        self._model.load_state_dict(checkpoint["broadcast"] | checkpoint["buffers"], strict=False)
        self._begin(checkpoint["broadcast"] | checkpoint["buffers"])
        self._model.load_state_dict(checkpoint["parameters"] | checkpoint["trained_buffers"], strict=False)
        self._kept = detached(self._params)
        self._round, self._step = checkpoint["round"], checkpoint["step"]
        self._ever = self._ever or self._step > 0 or self._round > 1
        for optimizer, (_, state) in zip(list(self._states), checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
            self._states[optimizer] = _memory(optimizer)

    def copy_outside(self) -> tuple[nn.Module, Log]:
        """A copy of the model, and a log for one step that is taken on it and not here.

        That step counts like one of this round: what it spends is spent, and it is noted where it has no proof.
        """
        self._ready("a step on a copy", after_update=True)
        self._compare("a step on a copy")
        model = copy.deepcopy(self._model)
        remove_ghosts(model)
        # statistics of this client's own training do not leave with a step
        sent = detached(self._buffers)
        set_buffers(model, {name: sent[first] for name, first in self._shared.items() if first in sent})
        self._ever = True
        if not self._guaranteed:
            self.log.ledger.add(0.0, 1.0)
        return model, Log(self.log.ledger)

    def close(self) -> None:
        """Take the defense off: the loop trains with plain gradients from here on."""
        set_buffers(self._model, self._replaced)
        self._past.note(dict(self._model.named_buffers()), self._buffers)
        self._let_go()
        for hook in self._hooks:
            hook.remove()
        with _lock:
            _guards.discard(self)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse("a guard cannot be copied or saved: protect the copy of the model, or save guard.checkpoint()")

    def _let_go(self) -> None:
        _left.update({optimizer: memory for optimizer, memory in self._states.items() if _memory(optimizer) == memory})
        for hook in [hook for pair in self._optimizer_hooks for hook in pair]:
            hook.remove()

    def _begin(self, broadcast: Mapping[str, Tensor]) -> None:
        """A round starts from what the model holds now. Buffers that the server did not send are those it sent last."""
        self._kept, self._broadcast = detached(self._params), detached(self._params)
        now = detached(dict(self._model.named_buffers()))
        known = broadcast.keys() | self._buffers.keys()  # others came with training and are not the server's
        self._buffers = {n: b if n in broadcast else self._buffers[n] for n, b in now.items() if n in known}
        self._prepared, self._update, self._pending = None, None, []
        self._step, self._round = 0, self._round + 1
        for p in self._params.values():
            p.grad = None
        self._forget()

    def _forget(self) -> None:
        self._gradients, self._passes, self._defended = Params(), list[Pass](), False

    def _ready(self, where: str, *, after_update: bool = False) -> None:
        if self not in _guards:
            refuse(f"{where}: this guard is closed")
        alive = {thread.ident for thread in threading.enumerate()}  # a thread that failed in a step holds up nobody
        if self._stepping in alive - {threading.get_ident()}:
            refuse(f"{where}: another thread is stepping the model")
        if self._update is not None and not after_update:
            refuse(f"{where}: the update of this round has left: call guard.new_round(broadcast) before you train on")

    def _moved(self, where: str) -> str | None:
        """Which parameter is not the broadcast plus the defended steps, if any."""
        now = dict(self._model.named_parameters())
        for name in now.keys() | self._params.keys():
            if now.get(name) is not self._params.get(name):
                return f"parameter {name!r} was replaced or added after protect ({where}): protect the model again"
        if moved := differing(self._params, self._kept):
            hint = "only guarded steps may move it. Load what the server sent with guard.new_round(broadcast)"
            return f"parameter {moved[0]!r} moved without the guard ({where}): {hint}"
        if changed := self._changed_buffers():
            return f"buffer {changed[0]!r} changed outside of a pass, and this defense keeps those of the server"
        return None

    def _changed_buffers(self) -> list[str]:
        return changed_buffers(self._model, self._buffers, self._shared.keys()) if self._guaranteed else []

    def _put_back(self) -> None:
        """The server's buffers, after a pass: what one keeps of its examples must have no part in a later one.

        A refusal would tell a server, which can craft its buffers, that one example is there.
        """
        if changed := self._changed_buffers():
            sent = detached({name: self._buffers[name] for name in changed if name in self._buffers})
            names = [name for name in changed if name not in sent]  # of buffers that the server does not know
            names += [name for name, first in self._shared.items() if first in sent]
            set_buffers(self._model, {name: sent.get(self._shared.get(name, name)) for name in names})

    def _compare(self, where: str) -> None:
        if moved := self._moved(where):
            refuse(moved)

    def _compare_gradients(self, where: str, held: set[int] | None = None) -> bool:
        """Whether the gradients are those that the guard gave; False if the loop took them away. Others are refused."""
        now = {name: p.grad for name, p in self._params.items() if held is None or id(p) in held}
        given = {name: want for name, want in self._gradients.items() if name in now} if self._passes else {}
        odd = differing(now, given)
        odd += [name for name, g in now.items() if name not in given and g is not None and g.any()]
        if odd and any(gradient is not None and gradient.any() for gradient in now.values()):
            refuse(
                f"the gradient of {odd[0]!r} is not the one that guard.loss gave ({where}): call zero_grad(), then "
                "guard.loss(...).backward() alone: no penalty beside it, no clipping by hand, no GradScaler"
            )
        return not odd and bool(self._passes)

    def _held(self, optimizer: Optimizer) -> set[int]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held - set(map(id, self._params.values())):
            refuse("the optimizer steps parameters that the guarded model does not have: they would go undefended")
        return held

    def _before_forward(self, _model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        set_buffers(self._model, self._replaced)
        self._replaced = {}
        replaced = self._mirror.follow() if self._starts_over else None
        if not torch.is_grad_enabled():
            return None  # evaluation
        if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
            refuse("DistributedDataParallel shares the gradient before the guard can defend it: train without it")
        given = inputs_of_call(arguments, keywords, self._defense)
        self._ready("model(inputs)", after_update=True)
        moved = replaced or self._moved("model(inputs)")
        self._last: tuple[Tensor, Functional | None, str | None] = (given, None, moved)
        self._stands_in = False
        if moved:
            return None  # evaluation with gradients does no harm: guard.loss refuses it
        inputs = self._defense.on_inputs(given, self._rng) if len(given) else given
        plain = self._mirror.function(followed=self._starts_over)
        if self._guaranteed:  # a counter of this pass may depend on the examples
            plain = plain.with_buffers({name: self._buffers[name] for name in plain.buffers if name in self._buffers})
        used = self._defense.on_forward(plain, len(inputs), self._rng)
        changed = {name: buffer for name, buffer in used.buffers.items() if buffer is not plain.buffers[name]}
        self._replaced = {name: self._model.get_buffer(name) for name in changed}
        set_buffers(self._model, changed)
        hint = "inputs that need a gradient would take the bare one past the guard: detach them"
        self._last = (inputs, used, hint if given.requires_grad else None)
        # many models fail on no examples, which Poisson sampling may draw: one of zeros stands in, and is cut off again
        self._stands_in = self._guaranteed and len(inputs) == 0
        return arguments_of(zeros_like_one(inputs) if self._stands_in else inputs)

    def _after_forward(self, _model: nn.Module, _arguments: tuple[Any, ...], outputs: Any) -> Any:
        self._put_back()
        if self._starts_over:
            self._mirror.note()
        if not torch.is_grad_enabled():
            return None
        inputs, function, moved = self._last
        logits = logits_of(outputs)[:0] if self._stands_in else logits_of(outputs)
        self._pending = [each for each in self._pending if each.outputs() is not None]
        returned = [weakref.ref(one) for one in {id(one): one for one in [logits, *returned_tensors(outputs)]}.values()]
        self._pending.append(Pass(returned[0], logits._version, inputs.detach(), function, moved, returned))
        return with_logits(outputs, logits) if self._stands_in else outputs

    def _outside(self, _gradient: Tensor) -> None:
        if not self._taking:
            refuse("outputs that went into guard.loss also went backward past it: put all of it into protect's loss")

    def _take(self, seen: Pass, total: Tensor, factor: Tensor) -> None:
        """In the backward pass: the gradient of one guarded loss, added to those since the last step."""
        if seen.factor is not None:
            refuse("one loss went backward twice: its examples would count twice")
        if not self._compare_gradients("backward"):
            self._forget()
        left = [p.grad for p in self._params.values() if p.grad is not None] if self._defended else []
        if any(gradient.any() for gradient in left):
            refuse("the gradient of the last step is still there: call optimizer.zero_grad() before backward()")
        if self._defended:
            self._forget()
        seen.factor, self._taking = float(factor), True
        wanted = {name: p for name, p in self._params.items() if p.requires_grad}
        try:
            with self._mirror.again() if self._starts_over else nullcontext():
                found = torch.autograd.grad(total, list(wanted.values()), factor, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise GradveilError("guarded models checkpoint with use_reentrant=False") from error
        finally:
            self._taking = False
            self._put_back()  # what a part of the model that is computed again has changed
        gradients: Sequence[Tensor | None] = found
        total_gradient = Params()
        for (name, p), gradient in zip(wanted.items(), gradients, strict=True):
            if gradient is None and self._guaranteed:
                gradient = torch.zeros_like(p)  # which parameters a batch does not reach tells of its examples
            if gradient is not None:
                total_gradient[name] = gradient.to_dense() if p.grad is None else p.grad + gradient.to_dense()
        kept = detached(total_gradient)
        # the loop gets its gradient last: where memory runs out before that, a step finds none that is not defended
        self._passes.append(seen)
        self._gradients |= kept
        for name, gradient in total_gradient.items():
            self._params[name].grad = gradient

    def _before_step(self, optimizer: Optimizer) -> None:
        if optimizer not in self._states:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, p in [*self._params.items(), *self._model.named_parameters()]:
                if id(p) in held:
                    refuse(f"an optimizer that the guard does not know steps {name!r}: call guard.use(optimizer)")
            return
        self._ready("optimizer.step")
        if getattr(optimizer, "grad_scale", None) is not None:
            refuse("a GradScaler scales this step, and guarded gradients are not scaled: train in bfloat16 instead")
        held = self._held(optimizer)
        if _memory(optimizer) != self._states[optimizer]:
            refuse("the optimizer's state was changed outside its guarded steps: make it anew and guard.use() it")
        self._compare("optimizer.step")
        if self._compare_gradients("optimizer.step", held if self._defended else None):
            self._defend(optimizer)
        self._stepping = threading.get_ident()
        for before, after in self._optimizer_hooks:  # the last look after all other hooks, the copy before all others
            if before.id in optimizer._optimizer_step_pre_hooks:
                cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks).move_to_end(before.id)
                cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)

    def _last_look(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Just before the step. It costs nothing where the optimizer has no other hooks."""
        stepping, self._stepping = self._stepping, 0  # a step that is refused here is over
        if not stepping:
            refuse("the guard's hook on all optimizers was taken off: put it back, or protect again in a new process")
        if any(map(callable, [*arguments[1:], *keywords.values()])):
            refuse("a guarded optimizer takes no closure: call backward() on guard.loss, then optimizer.step()")
        if len(_global_optimizer_pre_hooks) + len(optimizer._optimizer_step_pre_hooks) > 2:
            self._compare("a hook of the optimizer")
            self._compare_gradients("a hook of the optimizer", self._held(optimizer))
        self._stepping = stepping
        self._looked.add(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping = 0
        if optimizer not in self._looked:
            refuse("the guard's hooks on the optimizer were taken off: guard.use(optimizer) puts them back")
        self._looked.remove(optimizer)
        held, self._states[optimizer] = self._held(optimizer), _memory(optimizer)
        stepped = [name for name, p in self._params.items() if id(p) in held]
        self._kept |= detached({name: self._params[name] for name in stepped})

    def _defend(self, optimizer: Optimizer) -> None:
        """Replace the gradients of all passes since the last step by what the defense makes of them, once."""
        if self._defended:
            return
        if any((each.inputs._version, each.targets._version) != each.versions for each in self._passes):
            refuse("inputs or targets were overwritten before the step: the defense needs them. Use new tensors")
        sizes, factors = [len(each.inputs) for each in self._passes], [each.factor or 0.0 for each in self._passes]
        scale, count = sum(factors), sum(sizes)
        shares = zip(sizes, factors, strict=True)
        if not 0 < scale < math.inf or any(abs(f * count - n * scale) > 1e-5 * scale * count for n, f in shares):
            refuse(f"losses of {sizes} examples with factors {factors} are no mean over examples: weigh them by size")
        if self._guaranteed and abs(scale - 1) > 1e-5:
            refuse(
                f"the loss has a factor of {scale:.6g}, which would scale the noise: change the learning rate instead"
            )
        groups = [(type(one), group) for one in self._states for group in one.param_groups]
        plain = all(kind is torch.optim.SGD and not group["momentum"] for kind, group in groups)
        if self._defense.summed and not plain:
            refuse("this defense is proved for a sum of replies, each a step of SGD without momentum: use that")
        rate, expected = self._draws.check(count)
        live = {name: p.detach() for name, p in self._params.items()}
        step = Step(
            model=cast(Functional, self._passes[-1].model), loss=self._loss, rng=self._rng, log=self.log,
            number=self._step + 1, round_number=self._round, lr=float(optimizer.param_groups[0].get("lr", 0.0)),
            params={name: live[name] for name in self._gradients},
            frozen={name: tensor for name, tensor in live.items() if name not in self._gradients},
            batch=joined(self._passes, self._defense), sample_rate=rate, expected=expected,
        )  # fmt: skip
        given = self._gradients if scale == 1 else {name: g / scale for name, g in self._gradients.items()}
        self._prepared = self._prepared or self._defense.for_round(replace(step, number=0))
        word = None if self._ever else self._defense.caution(sum(own.numel() for own in given.values()), step.divisor)
        if word is not None:
            warnings.warn(word, stacklevel=2)
        with self._mirror.again() if self._starts_over else nullcontext():
            hidden = defended_step(self._prepared, given, step)
        self._compare("the defense")
        sent = detached(hidden if scale == 1 else scaled(hidden, scale))
        self._gradients = {name: gradient.to(self._params[name]) for name, gradient in sent.items()}
        for name, gradient in detached(self._gradients).items():
            self._params[name].grad = gradient
        self._defended, self._ever, self._step = True, True, step.number
        if not self._guaranteed:
            self.log.ledger.add(0.0, 1.0)  # no noise that counts: a later guard with a proof must know of it
        self._draws.use()


def _memory(optimizer: Optimizer) -> list[Any]:
    """What tells an optimizer's state from another, without a copy of it."""
    leaves = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    return [[leaf.shape for leaf in leaves], digests(leaves)]


def _before_any_step(optimizer: Optimizer, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
    with _lock:
        guards = list(_guards)
    for guard in guards:
        guard._before_step(optimizer)


register_optimizer_step_pre_hook(_before_any_step)  # once and for good: torch reads its hooks while others step
