"""Mods for any ClientApp: they see the global parameters come in and the local ones go out.

The first mod in a list is the outermost one: ``@app.train(mods=[tap(...), checked, defended("clip"), inspected(...)])``
inspects, trains, defends, checks, and taps what really leaves. Evaluation and queries pass all of them untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from logging import WARNING
from typing import get_args

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.supercore import log
from torch import nn

from gradveil.client import defend_update, inspect
from gradveil.client.client import OnSuspicion
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import derive
from gradveil.core.trees import add, subtract
from gradveil.core.types import Batch, Domain, Params, Recipe
from gradveil.defenses import DEFENSES, Defense
from gradveil.federated.flower.records import is_train, packed, place_of, round_number, tensors_of
from gradveil.federated.server import complaint

TRUSTED = "gradveil.trusted"
"""Where a node keeps the last broadcast that it trained on; it never leaves the node."""


def of_training(mod: Mod) -> Mod:
    """A mod that lets everything but training pass."""

    @wraps(mod)
    def only(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return mod(message, context, call_next) if is_train(message) else call_next(message, context)

    return only


def replied(message: Message, context: Context, call_next: ClientAppCallable) -> tuple[Message, Params, Params | None]:
    """The reply, the tensors that came in, and those that go out; None for an error, which goes out as it is."""
    sent = tensors_of(message.content)  # before: a ClientApp may empty its message to save memory
    reply = call_next(message, context)
    return reply, sent, None if reply.has_error() else tensors_of(reply.content)


@of_training
def checked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Nothing leaves that the server could not use: NaN, infinity or other shapes become an error that says so."""
    reply, sent, local = replied(message, context, call_next)
    if local is not None and (reason := complaint(local, sent)) is not None:
        raise GradveilError(f"the reply does not leave this node: {reason}")
    return reply


def defended(defense: str | Defense, *, seed: int | None = None) -> Mod:
    """A defense on the outgoing update: the server gets its own parameters plus the defended difference.

    For defenses that need nothing but the tensors, such as noise, clipping, sparsification and chains of them. ``seed``
    makes their draws repeatable, for experiments only: who knows it can take the noise away again.
    """
    built = DEFENSES.build(defense) if isinstance(defense, str) else defense
    try:
        defend_update({}, defense=built)
    except GradveilError as error:
        raise GradveilError(f"{error} in your train function, or gradveil's client_app with this defense") from None

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        drawn = None if seed is None else derive(seed, "flower", round_number(message), place_of(context))
        reply, sent, local = replied(message, context, call_next)
        if local is None:
            return reply
        if (reason := complaint(local, sent)) is not None:
            raise GradveilError(f"the reply cannot be defended: {reason}")
        before = {name: sent[name].to(tensor) for name, tensor in local.items() if tensor.is_floating_point()}
        after = {name: local[name] for name in before}
        update = defend_update(subtract(after, before), defense=built, seed=drawn)
        defended = local | add(before, update)
        reply.content[next(iter(reply.content.array_records))] = packed(defended | _variances(defended))
        return reply

    return of_training(mod)


def _variances(state: Params) -> Params:
    """Running variances, which noise can push below zero: the square root of one such spoils every output."""
    return {name: tensor.clamp(min=0) for name, tensor in state.items() if name.endswith("running_var")}


def inspected(
    module: nn.Module,
    *,
    on_suspicion: OnSuspicion = "refuse",
    domain: Domain | None = None,
    probe: Callable[[Message, Context], Batch] | None = None,
    recipe: Recipe | None = None,
) -> Mod:
    """Look at a broadcast before training on it; one that looks crafted is warned of, or answered by an error.

    More can be seen with a ``probe``, a function that returns a batch of any images (they do not leave), and less with
    the ``domain``, for which stand-ins are drawn. The last broadcast that was trained on stays in the node's state.
    """
    if on_suspicion not in get_args(OnSuspicion):
        raise GradveilError(f"on_suspicion is one of {', '.join(get_args(OnSuspicion))}, not {on_suspicion!r}")
    unwatched = {name for name, _ in module.named_buffers()}
    unwatched |= {name for name, _ in module.named_parameters(remove_duplicate=False)} - {
        name for name, _ in module.named_parameters()
    }

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if on_suspicion == "train":
            return call_next(message, context)
        sent = {name: tensor for name, tensor in tensors_of(message.content).items() if name not in unwatched}
        before = context.state.array_records.get(TRUSTED)
        found = inspect(
            module,
            sent,
            domain=domain,
            previous=None if before is None else before.to_torch_state_dict(),
            probe=None if probe is None else probe(message, context),
            recipe=recipe,
        )
        if found.suspicious and on_suspicion == "refuse":
            raise GradveilError(f"this node does not train: {found.summary}")
        if found.suspicious:
            log(WARNING, "%s", found.summary)
        context.state[TRUSTED] = ArrayRecord(dict(sent))
        return call_next(message, context)

    return of_training(mod)
