"""What a defense is: the identity at every hook of a client's local run, of which it overrides one or two.

Chains of defenses and their registry are here as well: ``clip:bound=4+noise:sigma=0.1`` clips, then adds noise.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache, reduce
from itertools import combinations
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, UnfitModelError
from gradveil.core.registry import F, Registry, describe_object, split_spec
from gradveil.core.streams import Stream
from gradveil.core.trees import all_finite, is_dense
from gradveil.core.types import Batch, Params
from gradveil.defenses.accounting import Guarantee, Ledger, check_rate
from gradveil.defenses.public import PublicData
from gradveil.engine import LocalLoss
from gradveil.models.functional import Functional

At = Literal["step", "update"]
"""Where a transform acts: on the gradient of each local step, or once on what leaves."""


class Log:
    """Figures a defense reports while it works, such as how often it fell back; each becomes its mean in the result.

    ``ledger`` is where a defense with a guarantee enters each step before it sends something of it, so that nobody
    else has to count. A log lives as long as its owner says: one reply, or a whole training under a guard. Whoever
    counts beyond that gives it a ledger that lives longer, or merges it into one.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self._values: dict[str, list[float | Tensor]] = defaultdict(list)

    def add(self, name: str, value: float | Tensor) -> None:
        """A tensor is read when somebody asks: a GPU need not stop for it now."""
        self._values[name].append(value.detach() if isinstance(value, Tensor) else value)

    def merge(self, other: Log) -> None:
        """Take over the figures of another log; not its ledger, which is about other data."""
        for name, values in other._values.items():
            self._values[name].extend(values)

    def values(self, name: str) -> tuple[float, ...]:
        """Everything reported under a name, in order."""
        return tuple(map(float, self._values.get(name, ())))

    def means(self) -> dict[str, float]:
        return {name: sum(self.values(name)) / len(self._values[name]) for name in sorted(self._values)}


@dataclass(frozen=True, kw_only=True)
class Step(LocalLoss):
    """What a defense may look at in one local step: everything here is on the client's side."""

    index: Tensor | None = None
    """[n]: where the examples of this step stand in the client's local data; None where nobody knows."""
    number: int
    """Counts from 1 over the whole local run."""
    round_number: int = 1
    """Counts from 1 over the broadcasts that this client has answered."""
    federation_round: int | None = None
    """Counts from 1 over the rounds of the federation, where the client need not believe the server for it."""
    lr: float
    rng: Stream
    log: Log = field(default_factory=Log)
    loss_value: Tensor | None = None
    """The loss at ``params`` on ``batch``, where computing the gradient gave it anyway."""
    sample_rate: float | None = None
    """With which probability each example is in this step, independently of all others and in secret (Poisson
    sampling); None where examples are chosen in any other way."""
    expected: float | None = None
    """Goes with ``sample_rate``: how many examples there are in such a step on average. The batch may be empty."""
    public: PublicData | None = None
    """Which data is public, from whoever knows all private examples; None: those of the batch are private."""

    def __post_init__(self) -> None:
        if (self.sample_rate is None) != (self.expected is None):
            raise GradveilError("sample_rate and expected describe one draw of examples and go together: give both")
        if self.sample_rate is not None:
            check_rate(self.sample_rate)
        if self.expected is not None and not 0 < self.expected < math.inf:
            raise GradveilError(f"expected is a number of examples above 0, not {self.expected}")

    @property
    def divisor(self) -> float:
        """What a sum over examples is divided by.

        Under Poisson sampling the size of the batch is secret too, and the expected size stands in for it.
        """
        return len(self.batch) if self.expected is None else self.expected

    def classes(self, batch: Batch | None = None) -> int:
        """How many classes the model tells apart, seen on this step's batch or on other examples."""
        with torch.no_grad():
            return int(self.model({**self.frozen, **self.params}, (batch or self.batch).inputs[:2]).shape[-1])


class Defense:
    """Sends everything as it is. Overrides return new objects and never edit an argument in place.

    Instances hold options and nothing that changes: what one round needs to remember is made by ``for_round``. Those
    of Gradveil are frozen dataclasses, whose fields are the options; a plain class does as well. What an instance keeps
    from round to round all the same is taken into account by audits: each client has a copy of its own. Secrets come
    from ``rng``: what an instance holds when it is made is known to everybody who knows the defense.

    Which hook runs where:

    ==============  =================================  ==============================  =================================
    hook            simulated client: audit, train,    ``gradveil.Client``,            ``defend_update``,
                    ``client_app`` on Flower           ``gradveil.protect``            Flower mod ``defended``
    ==============  =================================  ==============================  =================================
    check           before the first round             before the first round          no
    on_model        when the server builds the model   ``Client``; not ``protect``     no
    on_inputs       once for each reply                in each forward pass            no
    for_round       once for each reply                at the first step of a round    no
    on_forward      in each local step                 in each forward pass            no
    on_gradient     in each local step                 before each optimizer step      no
    on_update       on what leaves                     ``Client``; ``protect``         no
                                                       refuses who changes updates
    transform       by on_gradient or on_update        by on_gradient or on_update     on what leaves, whatever ``at``
    (Transform)                                                                        is; all others are refused
    ==============  =================================  ==============================  =================================
    """

    name: ClassVar[str] = ""
    """Under which it is registered."""
    reshapes: ClassVar[bool] = False
    """Whether ``on_model`` changes the architecture, which server and clients then agree on."""
    batches_clients: ClassVar[bool] = False
    """Whether ``on_gradients`` is faster than one client after another; such a defense is its own ``for_round``."""
    has_guarantee: ClassVar[bool] = False
    """Whether what it leaves has a proof, which holds for whatever is made of it without the private examples."""
    several_inputs: ClassVar[bool] = False
    """Whether it serves models with several inputs: ``step.batch.inputs`` is then no single tensor."""
    delta: float | None = None
    """For which delta ``step.log.ledger.spent(delta)`` is the epsilon of what it sent; None: it has no epsilon."""

    @property
    def changes_updates(self) -> bool:
        """Whether ``on_update`` changes what leaves, and steps alone would leave it bare."""
        return type(self).on_update is not Defense.on_update

    @property
    def summed(self) -> bool:
        """Whether its proof is about a sum of replies, and none is about one that is seen alone, or changed before."""
        return False

    @property
    def recomputes_gradient(self) -> bool:
        """Whether ``on_gradient`` begins with the private examples, whatever became of their gradient before it."""
        return False

    @property
    def spec(self) -> str:
        """The shortest text that builds an equal defense, such as ``noise:sigma=0.2``.

        Raises:
            GradveilError: if it is not registered, or an option is none that a text can hold.
        """
        return DEFENSES.spec(self)

    def __repr__(self) -> str:
        """The class and its options: what tells one defense from another."""
        plain = (bool, int, float, str, tuple, type(None))
        options = {k: v for k, v in sorted(vars(self).items()) if not k.startswith("_") and isinstance(v, plain)}
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def _require(self, good: bool, option: str, allowed: str) -> None:
        """Raise unless an option is good."""
        if not good:
            name = self.name or type(self).__name__
            raise GradveilError(f"defense {name}: {option} is {allowed}, not {getattr(self, option)}")

    def _require_kinds(self) -> None:
        """Raise unless each option of a dataclass is of its kind: a spec sees to that, and Python does not.

        A choice that is misspelled would else be taken for another one, and ``at`` for none.
        """
        words: dict[Any, str] = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            str: "a text",
            type(None): "none",
        }
        numbers: dict[Any, type] = {int: Integral, float: Real}
        for option, hint in _hints(cast(Any, type(self))).items():
            value, allowed = getattr(self, option), list[str]()
            good = False
            for kind in get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,):
                choices = get_args(kind) if get_origin(kind) is Literal else ()
                allowed += [f"one of {', '.join(map(str, choices))}"] if choices else [words.get(kind, "")]
                is_number = kind in numbers and isinstance(value, numbers[kind]) and not isinstance(value, bool)
                plain = kind in words and kind not in numbers and isinstance(value, kind)
                good = good or is_number or plain or (bool(choices) and value in choices) or not allowed[-1]
            self._require(good, option, " or ".join(allowed))

    def planned(self) -> Guarantee | None:
        """What the training that its options plan will have spent; None: they plan none."""
        return None

    def check_steps(self, steps: int) -> None:
        """Raise a GradveilError if an example would take part in more steps than planned."""

    def caution(self, numbers: int, examples: float) -> str | None:  # noqa: ARG002
        """What a client of so many examples should know that sends so many numbers in a step; None: nothing."""
        return None

    def schedule(self) -> tuple[int, ...]:
        """Rounds after the first from which on it does something else: audits look at each of them."""
        return ()

    def check(self, model: nn.Module) -> None:
        """Raise a GradveilError that names the fix if this defense cannot work on this model."""

    def on_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture that server and clients agree on, before the first broadcast."""
        return model

    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        """Change the local inputs [n, ...] in [0, 1] before training on them."""
        return inputs

    def for_round(self, start: Step) -> Defense:  # noqa: ARG002
        """The defense for one local run. ``start`` has number 0, the broadcast and all local examples."""
        return self

    def on_forward(self, model: Functional, examples: int, rng: Stream) -> Functional:  # noqa: ARG002
        """The model as this client evaluates it in one local step on so many examples."""
        return model

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        """Change the gradient of one local step before the optimiser takes it."""
        return gradient

    def on_gradients(self, gradients: Sequence[Params], steps: Sequence[Step]) -> list[Params]:
        """``on_gradient`` for several clients that answer the same broadcast."""
        return [self.on_gradient(gradient, step) for gradient, step in zip(gradients, steps, strict=True)]

    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        """Change what leaves the client."""
        return update


@lru_cache
def _hints(kind: type[Defense]) -> dict[str, Any]:
    """The types of a dataclass's options, by name; of none where a class inside a function names types of its own."""
    try:
        found = get_type_hints(kind)
    except NameError:
        return {}
    return {option.name: found[option.name] for option in fields(cast(Any, kind))}


class InRound(Defense):
    """A defense in one local run, with what it remembers in it: ``act`` is its ``on_gradient``."""

    def __init__(self, act: Callable[[Params, Step], Params]) -> None:
        self._act = act

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self._act(gradient, step)


class Transform(Defense):
    """A defense that needs nothing but the tensors: on every local gradient, or once on the outgoing update."""

    several_inputs: ClassVar[bool] = True
    at: At

    def __init__(self, *, at: At = "step") -> None:
        self.at = at

    @property
    def changes_updates(self) -> bool:
        return self.at == "update"

    @abstractmethod
    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:
        """What is sent instead of these named tensors."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        self._require(self.at in get_args(At), "at", "step or update")  # anything else would act nowhere
        return self.transform(gradient, step.rng, step.log) if self.at == "step" else gradient

    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:
        return self.transform(update, rng, log) if self.at == "update" else update


def check_model(defense: Defense, model: nn.Module) -> None:
    """Raise an UnfitModelError if the defense cannot work on the model."""
    try:
        defense.check(model)
    except GradveilError as error:
        raise UnfitModelError(str(error)) from error


def defended_step(defense: Defense, gradient: Params, step: Step, *, finite: bool = True) -> Params:
    """What a step takes in the place of a gradient, wherever a client trains; raises if the defense made no such thing.

    Without ``finite``, somebody else looks for NaN and infinity, and at what they come from.
    """
    hidden = defense.on_gradient(gradient, step)
    check_result(hidden, gradient, finite=finite)
    return hidden


def check_result(sent: Params, given: Params, *, finite: bool = True) -> None:
    """Raise unless a defense returned what it got: the same names and shapes, and finite real numbers."""
    if not isinstance(sent, dict) or (odd := sorted(sent.keys() ^ given.keys())):
        raise GradveilError("the defense did not return the tensors it got by name: some are missing or new")
    odd = [name for name, tensor in sent.items() if not is_dense(tensor) or tensor.shape != given[name].shape]
    if odd or (finite and not all_finite(sent)):
        odd = odd or [name for name, tensor in sent.items() if not all_finite({name: tensor})]
        raise GradveilError(f"the defense gave {odd[0]!r} another shape, or something else than finite real numbers")


class Chain(Defense):
    """Every hook of every link, in order. A link that would undo what one before it did is refused."""

    def __init__(self, links: Sequence[Defense]) -> None:
        self.links = tuple(part for link in links for part in links_of(link))  # a chain in a chain hides nothing
        for earlier, later in combinations(self.links, 2):
            names = type(earlier).__name__, type(later).__name__
            if later.recomputes_gradient and _changes_gradients(earlier):
                raise GradveilError(
                    f"{names[1]} begins with the private examples, so that what {names[0]} did to their gradient would "
                    "be lost: put it first in the chain"
                )
            if earlier.delta is not None and later.delta is not None:
                raise GradveilError(f"{names[0]} and {names[1]} both count an epsilon: use one of them")
            for one, other in ((earlier, later), (later, earlier)):
                if one.summed and (_changes_gradients(other) or other.changes_updates):
                    raise GradveilError(
                        f"{type(other).__name__} changes a reply before the sum that {type(one).__name__} is proved "
                        "for: use one of them, or no cohort"
                    )
            if earlier.has_guarantee and not needs_only_tensors(later) and _changes_gradients(later):
                raise GradveilError(
                    f"{names[1]} looks at the private examples again, so that the guarantee of {names[0]} would not "
                    "hold: only what needs no examples may follow it, such as sparsify"
                )

    @property
    def spec(self) -> str:
        return "+".join(link.spec for link in self.links) if type(self) is Chain else DEFENSES.spec(self)

    @property
    def summed(self) -> bool:
        return any(link.summed for link in self.links)

    @property
    def changes_updates(self) -> bool:
        return any(link.changes_updates for link in self.links)

    @property
    def reshapes(self) -> bool:  # type: ignore[override]
        return any(link.reshapes for link in self.links)

    @property
    def delta(self) -> float | None:  # type: ignore[override]
        return next((link.delta for link in self.links if link.delta is not None), None)

    def planned(self) -> Guarantee | None:
        return next((plan for link in self.links if (plan := link.planned()) is not None), None)

    def check_steps(self, steps: int) -> None:
        for link in self.links:
            link.check_steps(steps)

    def caution(self, numbers: int, examples: float) -> str | None:
        return next((word for link in self.links if (word := link.caution(numbers, examples))), None)

    def schedule(self) -> tuple[int, ...]:
        return tuple(number for link in self.links for number in link.schedule())

    def check(self, model: nn.Module) -> None:
        for link in self.links:
            link.check(model)

    def for_round(self, start: Step) -> Defense:
        return Chain([link.for_round(start) for link in self.links])

    def on_model(self, model: nn.Module) -> nn.Module:
        return reduce(lambda left, link: link.on_model(left), self.links, model)

    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:
        return reduce(lambda left, link: link.on_inputs(left, rng), self.links, inputs)

    def on_forward(self, model: Functional, examples: int, rng: Stream) -> Functional:
        return reduce(lambda left, link: link.on_forward(left, examples, rng), self.links, model)

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return reduce(lambda left, link: link.on_gradient(left, step), self.links, gradient)

    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:
        return reduce(lambda left, link: link.on_update(left, rng, log), self.links, update)


def needs_only_tensors(link: Defense) -> bool:
    """Whether it makes of what came before nothing but its ``transform``, and so sees no private examples."""
    kind, hooks = type(link), ("on_gradient", "on_gradients", "on_update", "for_round", "on_inputs", "on_forward")
    own = isinstance(link, Transform) and all(getattr(kind, hook) is getattr(Transform, hook) for hook in hooks)
    return own or kind is Defense


def _changes_gradients(link: Defense) -> bool:
    if needs_only_tensors(link) and isinstance(link, Transform):
        return link.at == "step"
    kind = type(link)
    return kind.on_gradient is not Defense.on_gradient or kind.for_round is not Defense.for_round


def links_of(defense: Defense) -> list[Defense]:
    """The defenses that a chain is made of, chains in it taken apart too; of any other defense itself.

    A subclass of Chain is one of those: whatever it does instead is not what its links do.
    """
    if type(defense) is not Chain:
        return [defense]
    return [part for link in defense.links for part in links_of(link)]


def can_remember(defense: Defense) -> bool:
    """Whether an instance can change while it works. A frozen dataclass of plain options cannot."""
    plain = (bool, int, float, str, type(None))

    def holds(value: object) -> bool:
        return isinstance(value, plain) or (isinstance(value, tuple) and all(map(holds, value)))

    def fixed(link: Defense) -> bool:
        options = getattr(type(link), "__dataclass_params__", None)
        frozen = options is not None and options.frozen
        return (type(link) is Defense or frozen) and all(map(holds, vars(link).values()))

    return not all(map(fixed, links_of(defense)))


def fresh(defense: Defense) -> Defense:
    """A copy that shares nothing with the defense, for one client or for the adversary.

    Raises:
        GradveilError: if it cannot be copied.
    """
    try:
        return copy.deepcopy(defense) if can_remember(defense) else defense
    except (TypeError, RuntimeError) as error:
        raise GradveilError(
            f"{type(defense).__name__} cannot be copied ({error}), but each client needs a defense of its own: "
            "make what it holds in for_round"
        ) from None


class DefenseRegistry(Registry[Defense]):
    """A registry whose specs may be chains."""

    _LINK = re.compile(r"\s*\+\s*(?=[A-Za-z_])")
    """A plus before a name: the one in 1e+3 stands before a digit."""

    def register(self, name: str) -> Callable[[F], F]:
        """Keep a class, or a function that makes a defense, under a name; a class gets the name too."""
        keep = super().register(name)

        def named(factory: F) -> F:
            if inspect.isclass(factory):
                cast(Any, factory).name = name
            return keep(factory)

        return named

    def links(self, spec: str) -> list[str]:
        """The specs that a chain is made of."""
        return self._LINK.split(spec.strip())

    def build(self, spec: str, *context: Any) -> Defense:
        parts = [super(DefenseRegistry, self).build(link, *context) for link in self.links(spec)]
        return parts[0] if len(parts) == 1 else Chain(parts)

    def canonical(self, spec: str) -> str:
        return "+".join(super(DefenseRegistry, self).canonical(link) for link in self.links(spec))

    def spec(self, defense: Defense) -> str:
        """The shortest spec of a defense that is no chain; see :attr:`Defense.spec`."""
        own = type(defense)
        name = "none" if own is Defense else vars(own).get("name", f"{own.__module__}:{own.__qualname__}")
        if name not in self or own.__module__ == "__main__":
            raise GradveilError(f"{type(defense).__name__} has no name to write: register it in DEFENSES")
        if changed := next((key for key in vars(defense) if callable(getattr(own, key, None))), None):
            raise GradveilError(f"{changed} of this {own.__name__} was changed after it was made: make a class of it")
        said = {}
        for option, parameter in self.options(name).items():
            value = getattr(defense, option)
            if not isinstance(value, bool | int | float | str | None):
                raise GradveilError(f"defense {name}: {option} is no text or number, so that no spec can hold it")
            if value != parameter.default:
                said[option] = value
        spec = self.canonical(f"{name}:{','.join(f'{option}={value}' for option, value in said.items())}")
        if type(self.build(spec)) is not own:
            raise GradveilError(f"{own.__name__} calls itself {name}, but that is another defense: register it")
        return spec

    def describe(self, defense: Defense) -> str:
        """The spec of a defense or, where it has no name, the class and its plain options in the same spelling.

        >>> class Halve(Defense): ...
        >>> DEFENSES.describe(Chain([Halve(), none()]))
        'Halve+none'

        A class that is called like another defense is told from it: somebody may have attacked that one by name.
        """
        if type(defense) is Chain:
            return "+".join(map(self.describe, defense.links))
        with suppress(GradveilError):
            spec = self.spec(defense)
            if ":" not in split_spec(spec)[0]:
                return spec
        described = describe_object(defense)
        return f"own {described}" if split_spec(described)[0] in self else described

    def named_links(self, spec: str, built: Defense | None = None) -> list[tuple[str, Defense | None]]:
        """The links of a defense by spec, built here unless it is at hand; None in the place of an unknown one."""
        specs = self.links(spec)
        if built is None:
            return [(link, self.build(link) if split_spec(link)[0] in self else None) for link in specs]
        links = links_of(built)
        return list(zip(specs if len(specs) == len(links) else map(self.describe, links), links, strict=True))

    def reshaping(self, spec: str, built: Defense | None = None) -> str | None:
        """Those links of a chain that change the architecture: what both sides must know to build the model."""
        if built is not None:
            return "+".join(name for name, link in self.named_links(spec, built) if link and link.reshapes) or None
        reshape = [link for link in self.links(spec) if self.reshapes(link)]
        return "+".join(super(DefenseRegistry, self).canonical(link) for link in reshape) or None

    def reshapes(self, link: str) -> bool:
        """Whether one defense changes the architecture: known without building it."""
        return bool(getattr(self.get(split_spec(link)[0]), "reshapes", False))


DEFENSES = DefenseRegistry("defense", base=Defense, group="gradveil.defenses")


@DEFENSES.register("none")
def none() -> Defense:
    """No defense: the update leaves as it is."""
    return Defense()
