"""DP-SGD (Abadi et al., CCS 2016): every example's gradient is clipped, noise in proportion to the clip is added."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.streams import Stream
from gradveil.core.trees import bits_of
from gradveil.core.types import Batch, Params
from gradveil.defenses.accounting import MOST_STEPS, Guarantee, Ledger, check_delta, check_rate, guarantee
from gradveil.defenses.base import DEFENSES, Defense, Log, Step
from gradveil.defenses.clip import clipped_mean
from gradveil.models import tensors_of


@DEFENSES.register("dp")
@dataclass(frozen=True, kw_only=True)
class DP(Defense):
    """DP-SGD: clip each example's gradient to ``bound``, add Gaussian noise of sigma * bound / n to their mean.

    n is the number of examples or, under Poisson sampling, the expected one. ``steps`` and ``sample_rate`` are the plan
    of a whole training: more steps are refused unless ``beyond_plan``.
    """

    has_guarantee: ClassVar[bool] = True
    several_inputs: ClassVar[bool] = True

    sigma: float = 1.1
    bound: float = 1.0
    delta: float = 1e-5
    sample_rate: float | None = None
    steps: int | None = None
    beyond_plan: bool = False

    def __post_init__(self) -> None:
        self._require(0 <= self.sigma < math.inf, "sigma", "at least 0")
        self._require(0 < self.bound < math.inf, "bound", "above 0")
        if self.steps is None and (self.sample_rate is not None or self.beyond_plan):
            raise GradveilError("defense dp: sample_rate and beyond_plan are about a planned training: give its steps")
        planned = self.steps is None or 1 <= self.steps <= MOST_STEPS
        self._require(planned, "steps", f"at least 1 and at most {MOST_STEPS}")
        try:
            check_delta(self.delta)
            check_rate(1.0 if self.sample_rate is None else self.sample_rate)
        except GradveilError as error:
            raise GradveilError(f"defense {self.name}: {error}") from None

    @property
    def recomputes_gradient(self) -> bool:
        return True

    @property
    def counted(self) -> float:
        """The noise that the ledger counts, in units of what one example can change."""
        return self.sigma

    def check(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                raise GradveilError(
                    f"defense {self.name} cannot bound one example in {parameter.dtype} (parameter {name!r}), whose "
                    "sums lose small parts: keep the model in float32"
                )
        for name, layer in model.named_modules():
            if isinstance(layer, _BatchNorm):
                raise GradveilError(
                    f"defense {self.name} cannot bound one example's influence through batch norm (layer {name!r}): "
                    "build the model with batch_norm=false where it has that option, or replace the layer by "
                    "torch.nn.GroupNorm"
                )
            if isinstance(layer, _NormBase) and layer.track_running_stats:
                raise GradveilError(
                    f"defense {self.name} cannot cover the running statistics of layer {name!r}, which are sent as "
                    "they are: build the layer with track_running_stats=False"
                )

    def for_round(self, start: Step) -> Defense:  # noqa: ARG002
        return _DPRound(self)

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        self.enter(step, 1 if step.sample_rate is not None else _copies(step.batch) ** 2)
        return self.noisy(step)

    def enter(self, step: Step, steps: int, *also: Ledger) -> None:
        """Write what a step costs into its ledger, and others, before anything of it is sent; if the plan allows it.

        A rate below 1 is counted only for a step that was drawn so: nothing is gained from draws that others know.
        """
        self.check_steps(step.log.ledger.steps + steps)
        for ledger in (step.log.ledger, *also):
            ledger.add(self.counted, 1.0 if step.sample_rate is None else step.sample_rate, steps)

    def noisy(self, step: Step) -> Params:
        """What the step sends: of an empty batch the noise alone."""
        if step.divisor == 0:
            raise GradveilError(
                f"defense {self.name}: a step without examples needs the number that is expected of its draw"
            )
        mean = clipped_mean(step, self.bound)
        if any(tensor.dtype.itemsize < 4 for tensor in mean.values()):
            raise GradveilError(
                f"defense {self.name} cannot bound one example in half precision: keep the model in float32"
            )
        return step.rng.noised(mean, self.sigma * self.bound / step.divisor)

    def planned(self) -> Guarantee | None:
        if self.steps is None:
            return None
        rate = 1.0 if self.sample_rate is None else self.sample_rate
        return guarantee(sigma=self.counted, sample_rate=rate, steps=self.steps, delta=self.delta)

    def check_steps(self, steps: int) -> None:
        if self.steps is not None and steps > self.steps and not self.beyond_plan:
            raise GradveilError(
                f"defense {self.name}: an example takes part in {steps} steps, more than the {self.steps} that are "
                "planned: plan more of them, or use dp with beyond_plan=true and watch epsilon"
            )


def _copies(batch: Batch) -> int:
    """How often the most frequent example is in a batch, bit for bit and with its label."""
    if len(batch) < 2:
        return 1
    parts = [bits_of(tensor.reshape(len(batch), -1)) for tensor in (*tensors_of(batch.inputs), batch.labels)]
    sums = torch.stack([part.sum(dim=1, dtype=torch.int64) for part in parts]).sum(dim=0)
    _, places, times = torch.unique(sums, return_inverse=True, return_counts=True)
    again = times[places] > 1  # equal examples have equal sums: few rows are compared whole
    if not again.any():
        return 1
    rows = torch.cat([part[again].long() for part in parts], dim=1)
    return int(torch.unique(rows, dim=0, return_counts=True)[1].max())


class _DPRound(Defense):
    """One local run. Where it is known which examples take part in a step, it costs no more than the most visited."""

    def __init__(self, defense: DP) -> None:
        self.defense = defense
        self.ledger = Ledger()
        self.visits: dict[int, int] = {}
        self.most = 0

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        if step.sample_rate is not None:
            steps = 1  # one draw of records: equal ones are different people
        else:
            steps = _copies(step.batch) ** 2 if step.index is None else self._further(step.index)
        self.defense.enter(step, steps, self.ledger)
        return self.defense.noisy(step)

    def _further(self, index: Tensor) -> int:
        """By how many steps the most visited example got further."""
        places, times = torch.unique(index, return_counts=True)
        for place, count in zip(places.tolist(), times.tolist(), strict=True):
            # Twice in one batch is twice the influence, which costs as much as four steps.
            self.visits[place] = self.visits.get(place, 0) + count**2
        before, self.most = self.most, max(self.visits.values(), default=0)
        return self.most - before

    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        try:
            found = {
                "epsilon_reply": self.ledger.guarantee(self.defense.delta),
                "epsilon_planned": self.defense.planned(),
            }
        except NotAvailableError:  # the defense works without an accountant; only the numbers are missing
            return update
        for name, one in found.items():
            if one is not None and math.isfinite(one.epsilon):
                log.add(name, one.epsilon)
        return update
