"""Mods for any ClientApp: they see the global parameters come in and the local ones go out.

The first mod in a list is the outermost one: ``ClientApp(mods=[tap(...), checked, defended("clip"), inspected(...)])``
inspects, trains, defends, checks, and taps what really leaves. Given to the app and not only to its train function,
``defended`` also sees to it that evaluation and queries carry no arrays. The tap stands outside of everything that may
still change the reply, and what it cannot write does not leave: a reply that nobody could look at later is not sent as
though all was well.

Whatever a mod refuses becomes an error in the place of the reply, with one line for the server and for the log.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, get_args

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode
from flwr.supercore import log
from torch import nn

from gradveil.client import OnSuspicion, defend_update, inspect
from gradveil.client.updates import check_transforms, tied
from gradveil.core.errors import GradveilError
from gradveil.core.trees import add, scaled, subtract
from gradveil.core.types import Batch, Params, Recipe
from gradveil.defenses import DEFENSES, Defense
from gradveil.domains import Domain
from gradveil.federated.flower.records import (
    EXAMPLES,
    fitted,
    is_train,
    packed,
    place_of,
    round_number,
    tensors_of,
    writing,
)
from gradveil.federated.rounds import RoundExchange, State
from gradveil.federated.tap import Tap
from gradveil.threat import Knowledge, observe, threat_model

P = ParamSpec("P")
TRUSTED = "gradveil.trusted"
"""Where a node keeps the last broadcast that it trained on; it never leaves the node."""

LARGEST_EXTRA = 2048
"""How many bytes a reply may carry beside its arrays: enough for metrics, too little for an update."""

Statistics = Literal["withhold", "defend", "send"]
"""What becomes of running statistics: the server gets its own back, they are defended like parameters, or they leave
as they are."""

_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"
INSIDE: ContextVar[bool] = ContextVar("inside", default=False)
"""Whether a mod outside of this one still has to defend what comes back."""


def fails_closed(answer: Callable[Concatenate[Message, P], Message]) -> Callable[Concatenate[Message, P], Message]:
    """An app or a mod whose errors, and those of what it calls, become an error in the place of the reply.

    It is one line in the log of the node, and the same to the server. The text of an exception that is not Gradveil's
    may quote private data, and Flower would send it: it stays here.
    """

    @wraps(answer)
    def closed(message: Message, /, *rest: P.args, **named: P.kwargs) -> Message:
        try:
            return answer(message, *rest, **named)
        except GradveilError as error:
            reason = str(error)
        except Exception as error:
            log(ERROR, "the app failed", exc_info=error)
            reason = f"the app failed with {type(error).__name__}: the node's log says where"
        line = " ".join(reason.split())[:500]
        log(ERROR, "%s", line)
        return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, line), reply_to=message)

    return closed


def of_training(mod: Mod) -> Mod:
    """A mod that lets everything but training pass."""

    @wraps(mod)
    def only(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return mod(message, context, call_next) if is_train(message) else call_next(message, context)

    return only


@fails_closed
@of_training
def checked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Nothing leaves that the server could not use: NaN, infinity or other shapes become an error that says so."""
    sent = tensors_of(message.content)  # before: a ClientApp may empty its message to save memory
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    try:
        fitted(tensors_of(reply.content), sent)
    except GradveilError as error:
        raise GradveilError(f"the reply does not leave this node: {error}") from None
    return reply


def defended(defense: str | Defense, *, statistics: Statistics = "withhold") -> Mod:
    """A defense on the outgoing update: the server gets its own parameters plus the defended difference.

    For defenses that need nothing but the tensors, such as noise, clipping, sparsification and chains of them. A reply
    that it cannot defend whole does not leave: one with other arrays than the broadcast, or with lists or bytes beside
    them, or with arrays in answer to anything but training.

    Args:
        defense: a spec or an object.
        statistics: what becomes of running statistics of norm layers. With batch norm a server that gets its own
            statistics back evaluates with those it started with: use group norm, or say what may leave.
    """
    if statistics not in get_args(Statistics):
        raise GradveilError(f"statistics is one of {', '.join(get_args(Statistics))}, not {statistics!r}")
    built = DEFENSES.build(defense) if isinstance(defense, str) else defense
    try:
        links = check_transforms(built)
    except GradveilError as error:
        raise GradveilError(f"{error} in your train function, or gradveil's client_app with this defense") from None
    if not links:
        raise GradveilError("defended needs a defense, and this one sends every update as it is: leave the mod out")

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        sent = tensors_of(message.content) if is_train(message) else {}
        inside = INSIDE.set(True)
        try:
            reply = call_next(message, context)
        finally:
            INSIDE.reset(inside)
        if reply.has_error():
            return reply
        _check_extras(reply.content)
        if not is_train(message):
            if reply.content.array_records:
                raise GradveilError(
                    f"a reply to {message.metadata.message_type} carries arrays, which are not defended"
                )
            return reply
        local = fitted(tensors_of(reply.content), sent)
        update, withheld = _split(sent, local, statistics)
        # Tied weights leave equal. They are found by what leaves: a server may send other values under each name, so
        # that the differences are not equal, and a mean over the names would hold less noise.
        twins = tied({name: local[name] for name, tensor in update.items() if tensor.any()})
        hidden = defend_update({name: t for name, t in update.items() if name not in twins}, defense=built)
        leaving = local | withheld | add({name: sent[name] for name in hidden}, hidden)
        leaving |= {name: leaving[first] for name, first in twins.items()}
        leaving |= {n: t.clamp(min=0) for n, t in leaving.items() if n.endswith("running_var")}  # noise can go below 0
        reply.content[next(iter(reply.content.array_records))] = packed(fitted(leaving, sent))
        return reply

    return fails_closed(mod)


def _split(sent: Params, local: Params, statistics: Statistics) -> tuple[Params, Params]:
    """The update that is to be defended, and what the server gets back as it sent it."""
    update: Params = {}
    withheld: Params = {}
    for name, tensor in sent.items():
        if tensor.is_floating_point():
            if statistics == "defend" or not name.endswith(_STATISTICS):
                update |= subtract({name: local[name]}, {name: tensor})
            elif statistics == "withhold":
                withheld[name] = tensor
        elif name.endswith(_COUNTER):
            if statistics != "send":
                withheld[name] = tensor
        elif not local[name].equal(tensor):
            raise GradveilError(
                f"the reply cannot be defended: {name!r} holds whole numbers that changed, which no defense covers"
            )
    if not update:
        raise GradveilError("the reply cannot be defended: there is no parameter in it")
    if withheld:
        log(INFO, "%d running statistics and counters stay on this node", len(withheld))
    return update, withheld


def _check_extras(content: RecordDict) -> None:
    """Refuse what could carry an update past the defense: lists, bytes, and much of anything."""
    size = sum(len(name) for name in content)
    records: list[MetricRecord | ConfigRecord] = [*content.metric_records.values(), *content.config_records.values()]
    for record in records:
        for key, value in record.items():
            if isinstance(value, list | bytes) and len(value) > 0:
                raise GradveilError(
                    f"the reply carries {type(value).__name__} under {key[:40]!r}, which no defense covers: only "
                    "numbers and short texts leave beside the arrays"
                )
            size += len(key) + (len(value.encode()) if isinstance(value, str) else 8)
    if size > LARGEST_EXTRA:
        raise GradveilError(f"the reply carries {size:,} bytes beside its arrays, and {LARGEST_EXTRA:,} are the most")


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
            log(WARNING, "%s", found.summary)  # it stays here: the probe may be of private examples
            raise GradveilError("this node does not train: the broadcast looks crafted")
        if found.suspicious:
            log(WARNING, "%s", found.summary)
        context.state[TRUSTED] = ArrayRecord(dict(sent))
        return call_next(message, context)

    return fails_closed(of_training(mod))


@dataclass(frozen=True)
class MessageExchange:
    """One exchange as it passed the line: parameters in, parameters out."""

    round_number: int
    client: int
    sent: Params
    local: Params
    examples: int | None
    """How many are behind it, where the reply says so."""

    def update(self, recipe: Recipe) -> Params:
        """The reply in the terms of a recipe: the difference or, of a single step, its gradient."""
        change = subtract(self.local, self.sent)
        return scaled(change, -1 / recipe.lr) if recipe.sends == "gradient" else change


def tap(on_exchange: Callable[[MessageExchange], None]) -> Mod:
    """Show every exchange of training to ``on_exchange``; errors carry no parameters and are not shown.

    If ``on_exchange`` raises, the reply does not leave. Inside of ``defended`` a tap would write down the bare update,
    and is refused.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if INSIDE.get():
            raise GradveilError(
                "the tap stands inside of defended, where the update is bare: put it first among the mods"
            )
        number, client = round_number(message), place_of(context)
        sent = tensors_of(message.content)  # before: a ClientApp may empty its message to save memory
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        local = fitted(tensors_of(reply.content), sent)
        counts = [record.get(EXAMPLES) for record in reply.content.metric_records.values()]
        examples = next((count for count in counts if isinstance(count, int)), None)
        with writing("its tap"):
            on_exchange(MessageExchange(number, client, sent, local, examples))
        return reply

    return fails_closed(of_training(mod))


def recorded(
    folder: Path,
    *,
    module: nn.Module,
    model: str,
    domain: Domain,
    recipe: Recipe,
    defense: str = "none",
    threat: str = "C",
) -> Callable[[MessageExchange], None]:
    """Writes each exchange into a new file of its own, as this threat model's adversary has it.

    ``model`` is the spec of ``module``, or the import path that builds it. ``defense`` is what the client uses, by
    whatever means. The adversary gets the number of examples if it may know it, and never labels or statistics: these
    a mod does not see.
    """
    adversary = threat_model(threat)
    hidden = adversary.knows & {Knowledge.LABELS, Knowledge.STATISTICS}
    if hidden:
        raise GradveilError(f"threat {adversary.name} knows {', '.join(sorted(hidden))}, which a mod does not see")
    shapes, known = {name: p.shape for name, p in module.named_parameters()}, module.state_dict().keys()
    used = DEFENSES.canonical(defense)
    view = partial(observe, model=model, domain=domain, recipe=recipe, defense=used, threat=adversary)
    write = Tap(folder, module, view, overwrite=False)

    def save(one: MessageExchange) -> None:
        wrong = {name for name in shapes if name not in one.sent or one.sent[name].shape != shapes[name]}
        if wrong := wrong | (one.sent.keys() - known):
            raise GradveilError(f"the tap was told of another model: {min(wrong)!r} is not as in the message")
        buffers = {name: tensor for name, tensor in one.sent.items() if name not in shapes}
        update = one.update(recipe)
        sent, change = ({name: tree[name] for name in shapes} for tree in (one.sent, update))
        write(RoundExchange(one.round_number, one.client, State(sent, buffers), change, one.examples))

    return save
