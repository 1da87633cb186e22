"""The tap as a mod: what really leaves a node, in files as ``gradveil attack`` reads them.

It stands first in the list of mods, outside of everything that may still change the reply. What it cannot write does
not leave: a reply that nobody could look at later is not sent as though all was well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from gradveil.core.errors import GradveilError
from gradveil.core.trees import scaled, subtract
from gradveil.core.types import Domain, Params, Recipe
from gradveil.defenses import DEFENSES
from gradveil.federated.flower.mods import INSIDE, fails_closed, of_training
from gradveil.federated.flower.records import EXAMPLES, fitted, place_of, round_number, tensors_of, writing
from gradveil.federated.tap import new_name, tap_name
from gradveil.threat import Knowledge, Observation, save_observations, threat_model


@dataclass(frozen=True)
class Passed:
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


def tap(on_exchange: Callable[[Passed], None]) -> Mod:
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
        said = [record.get(EXAMPLES) for record in reply.content.metric_records.values()]
        examples = next((count for count in said if isinstance(count, int)), None)
        with writing("its tap"):
            on_exchange(Passed(number, client, sent, local, examples))
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
) -> Callable[[Passed], None]:
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
    spelled, reshaped = DEFENSES.canonical(defense), DEFENSES.reshaping(defense)

    def save(one: Passed) -> None:
        if wrong := {n for n in shapes if n not in one.sent or one.sent[n].shape != shapes[n]} | (
            one.sent.keys() - known
        ):
            raise GradveilError(f"the tap was told of another model: {min(wrong)!r} is not as in the message")
        module.load_state_dict({n: t for n, t in one.sent.items() if n not in shapes}, strict=False)
        update = one.update(recipe)
        seen = Observation(
            module=module,
            model=model,
            domain=domain,
            threat=adversary.name,
            sent={name: one.sent[name] for name in shapes},
            reply={name: update[name] for name in shapes},
            kind=recipe.sends,
            batch_size=one.examples if Knowledge.BATCH_SIZE in adversary.knows else None,
            recipe=recipe if Knowledge.RECIPE in adversary.knows else None,
            defense=spelled if Knowledge.DEFENSE in adversary.knows else None,
            reshaped=reshaped,
        )
        with new_name(folder, tap_name(one.round_number, one.client)) as name:
            save_observations(folder / f"{name}.safetensors", [seen])

    return save
