"""What a defense costs: the time of a local step with it over the time without, and how its work could be done slower.

Beside the ratio to a plain step, four defenses are compared in the same run with the plain way to compute them: CENSOR
with its trials evaluated one after the other, OUTPOST over a whole local epoch, Soteria with one backward pass for each
entry of the representation, GradDefense with one second-order pass for each parameter.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

import torch
from torch import Tensor

from gradveil import models
from gradveil.client import SimulatedClient, cross_entropy
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.seeding import generator
from gradveil.core.streams import Kind, Stream
from gradveil.core.trees import map_each
from gradveil.core.types import Batch, Json, Params, Recipe
from gradveil.defenses import DEFENSES, Defense, Step
from gradveil.defenses.public import public_images
from gradveil.lab.bench.base import CIFAR, benchmark, seconds
from gradveil.models import Functional, classifier

STANDARD_DEFENSES = (
    "noise", "clip", "clip:per=example", "sparsify", "dp", "soteria", "graddefense", "censor", "outpost",
    "dcs2:iterations=10", "dcs2plus:iterations=10", "precode", "ats",
)  # fmt: skip
EPOCH = 10
"""Local steps of the epoch over which OUTPOST is measured: its share of perturbed steps falls from step to step."""
FEWEST_ROUNDS, LONGEST = 5, 30
"""Where a round takes long, comparisons end after so many rounds and seconds."""
SAMPLED = 16
"""Entries or layers of which the slow ways are timed; the rest is multiplied up."""


@benchmark
def overhead(
    *,
    model: Annotated[str, "Model, such as resnet18."] = "lenet",
    batch_size: Annotated[int, "Examples in the local step."] = 64,
    device: Annotated[str, "cpu or cuda."] = "cpu",
    defenses: Annotated[Sequence[str], "Only these defenses; may stand several times."] = STANDARD_DEFENSES,
    repeats: Annotated[int, "Timed runs of each; the fastest counts."] = 5,
    progress: Progress = SILENT,
) -> Json:
    """Time of one local step with each defense over one without.

    A row is of a defense; one that does not fit the model has the reason.
    """
    rng = generator(0, "bench", device=device)
    inputs = torch.rand((batch_size, *CIFAR.shape), generator=rng, device=device)
    batch = Batch(inputs, torch.arange(batch_size, device=device) % CIFAR.classes)
    bare = _LocalStep(models.build(model, CIFAR, seed=0).to(device), Defense(), batch, device, repeats)
    plain = bare.fastest(bare.reply())
    rows: list[Json] = []
    with progress.task("overhead", len(defenses)) as task:
        for spec in defenses:
            task.note(spec)
            defense = DEFENSES.build(spec)
            row: Json = {"defense": spec, "step_ms": None, "plain_step_ms": round(plain, 3), "ratio": None}
            try:
                defended = replace(bare, defense=defense, module=defense.on_model(bare.module))
                defense.check(defended.module)
            except GradveilError as error:
                rows.append(row | {"refused": str(error)})
            else:
                took = defended.fastest(defended.reply())
                row |= {"step_ms": round(took, 3), "ratio": round(took / plain, 3)}
                compare = COMPARED.get(spec.partition(":")[0])
                rows.append(row if compare is None else row | compare(defended))
            task.advance()
    return {"rows": rows}


@dataclass(frozen=True)
class _LocalStep:
    """One local step of a client, and how its parts are timed."""

    module: torch.nn.Module
    defense: Defense
    batch: Batch
    device: str
    repeats: int

    def reply(self, stream: Callable[[], Stream] = lambda: Stream.seeded(0)) -> Callable[[], object]:
        """The gradient and what the defense makes of it, its preparation too."""
        client = SimulatedClient(self.module, recipe=Recipe(), defense=self.defense)
        sent = client.model.params
        return lambda: client.reply(sent, self.batch, stream())

    def within(self) -> tuple[Params, Step]:
        """The gradient, and the step as the defense sees it."""
        function = Functional(self.module)
        step = Step(
            model=function, loss=cross_entropy, params=function.params, batch=self.batch, number=1, lr=0.1,
            rng=Stream.seeded(0),
        )  # fmt: skip
        with torch.no_grad():
            value = step.loss_at(step.params)
        return step.gradient(), replace(step, loss_value=value)

    def fastest(self, work: Callable[[], object], repeats: int | None = None) -> float:
        """The fastest of some runs after a warm-up, in milliseconds: noise of a machine only ever adds."""
        work()
        return 1e3 * min(seconds(work, self.device) for _ in range(max(1, repeats or self.repeats)))

    def compared(self, one: Callable[[], object], other: Callable[[], object], rounds: int) -> list[float]:
        """The milliseconds of both, and how many times as long the other takes: medians over rounds with a run of each.

        A busy moment falls on both of a round. The fastest of each would not do: a machine has moments of unusual speed
        too, and where only one of the two meets such a moment the ratio is off by a tenth.
        """
        one(), other()
        started, took = time.perf_counter(), [(seconds(one, self.device), seconds(other, self.device))]
        while len(took) < rounds and (len(took) < FEWEST_ROUNDS or time.perf_counter() - started < LONGEST):
            took.append((seconds(one, self.device), seconds(other, self.device)))
        return [1e3 * median(a for a, _ in took), 1e3 * median(b for _, b in took), median(b / a for a, b in took)]


def _censor(own: _LocalStep) -> Json:
    """The whole defense against nothing but the losses of its trials, each evaluated by itself."""
    gradient, step = own.within()
    trials = getattr(own.defense, "trials", 20)

    def evaluations() -> None:
        with torch.no_grad():
            for _ in range(trials):
                step.loss_at(step.params)

    slow, whole, ratio = own.compared(evaluations, lambda: own.defense.on_gradient(gradient, step), 16 * own.repeats)
    return {"defense_ms": round(whole, 3), "trials_in_turn_ms": round(slow, 3), "to_trials": round(ratio, 3)}


def _outpost(own: _LocalStep) -> Json:
    """A whole local epoch of mini-batches of this size."""
    many = Batch(torch.cat([own.batch.inputs] * EPOCH), own.batch.labels.repeat(EPOCH))
    recipe = Recipe(sends="delta", batch_size=len(own.batch), lr=0.01)

    def epoch(defense: Defense) -> Callable[[], object]:
        client = SimulatedClient(own.module, recipe=recipe, defense=defense)
        sent = client.model.params
        return lambda: client.reply(sent, many, Stream.seeded(0))

    # Many short epochs: what OUTPOST adds is less than a busy moment does.
    bare, defended, ratio = own.compared(epoch(Defense()), epoch(own.defense), 16 * own.repeats)
    return {"epoch_ms": round(defended, 2), "plain_epoch_ms": round(bare, 2), "epoch_ratio": round(ratio, 3)}


def _soteria(own: _LocalStep) -> Json:
    """One backward pass for each entry of the representation, with gradients in the parameters, as in the release."""
    gradient, step = own.within()
    prepared = own.defense.for_round(replace(step, number=0))
    whole = own.fastest(lambda: prepared.on_gradient(gradient, step))
    watched, inputs = copy.deepcopy(own.module), own.batch.inputs.clone().requires_grad_()
    caught: list[Tensor] = []
    layer = watched.get_submodule(classifier(watched, inputs))
    layer.register_forward_pre_hook(lambda _layer, given: caught.append(given[0].flatten(1)))
    watched(inputs)
    entries = caught[0].shape[1]
    some = min(entries, SAMPLED)

    def backward_each() -> None:
        for i in range(some):
            watched.zero_grad()
            inputs.grad = None
            torch.autograd.backward(caught[0][:, i].sum(), retain_graph=True)

    return _times(whole, own.fastest(backward_each) * entries / some, "backward_per_entry_ms")


def _graddefense(own: _LocalStep) -> Json:
    """One derivative of a layer's summed gradient in the inputs for each parameter, one after the other."""
    _, step = own.within()
    repeats = max(1, own.repeats // 2)
    whole = own.fastest(lambda: own.defense.for_round(replace(step, number=0)), repeats)
    root = public_images("samples", own.batch.inputs, 50)

    def layer_by_layer() -> list[Tensor]:
        inputs = root.inputs.clone().requires_grad_()
        leaves = {name: p.detach().requires_grad_() for name, p in step.params.items()}
        loss = step.model.loss(cross_entropy, leaves, inputs, root.labels)
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        return [torch.autograd.grad(gradient.sum(), inputs, retain_graph=True)[0] for gradient in gradients]

    return _times(whole, own.fastest(layer_by_layer, repeats), "layer_by_layer_ms")


def _times(whole: float, slow: float, name: str) -> Json:
    return {"defense_ms": round(whole, 3), name: round(slow, 3), "times_faster": round(slow / whole, 2)}


class _TorchStream(Stream):
    """Draws noise as torch does: what a stream that can be computed back would cost."""

    def noised(self, tree: Params, deviation: float, kind: Kind = "gaussian") -> Params:  # noqa: ARG002
        device = next(iter(tree.values())).device
        rng = torch.Generator(device).manual_seed(0)
        return map_each(
            lambda g: g + deviation * torch.randn(g.shape, generator=rng, device=device, dtype=g.dtype), tree
        )


def _streams(own: _LocalStep) -> Json:
    """The same step with noise from torch's generator."""
    torchs, ours, ratio = own.compared(own.reply(_TorchStream), own.reply(Stream.secret), 4 * own.repeats)
    return {"secret_ms": round(ours, 3), "torch_ms": round(torchs, 3), "to_torch": round(ratio, 3)}


COMPARED: dict[str, Callable[[_LocalStep], Json]] = {
    "noise": _streams,
    "dp": _streams,
    "censor": _censor,
    "outpost": _outpost,
    "soteria": _soteria,
    "graddefense": _graddefense,
}
