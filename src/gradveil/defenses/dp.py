"""DP-SGD (Abadi et al., CCS 2016): every example's gradient is clipped, noise in proportion to the clip is added."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.trees import add, gaussian_like
from gradveil.core.types import Params
from gradveil.defenses.base import Defense, Log, Step
from gradveil.defenses.clip import clipped_mean
from gradveil.defenses.registry import DEFENSES

Accountant = Literal["rdp", "prv"]
_COUNTED_FINELY = 100.0
"""Up to which epsilon the prv accountant is asked: above, it takes gigabytes, and nobody is promised anything."""


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) differential privacy towards one example that takes part or not, and whose count that is."""

    epsilon: float
    delta: float
    accountant: str


@DEFENSES.register("dp")
class DP(Defense):
    """DP-SGD: clip each example's gradient to ``bound``, add Gaussian noise of sigma * bound / n to their mean."""

    guaranteed = True

    def __init__(
        self,
        *,
        sigma: float = 1.1,
        bound: float = 1.0,
        delta: float = 1e-5,
        sample_rate: float | None = None,
        steps: int | None = None,
        accountant: Accountant = "rdp",
    ) -> None:
        if not 0 <= sigma < math.inf:
            raise GradveilError(f"defense dp: sigma is at least 0, not {sigma}")
        if not 0 < bound < math.inf:
            raise GradveilError(f"defense dp: bound is above 0, not {bound}")
        if (sample_rate is None) != (steps is None):
            raise GradveilError("defense dp: sample_rate and steps describe one training and go together: give both")
        if sample_rate is not None and steps is not None:
            _check_training(sample_rate, steps)
        _check_delta(delta)
        self.sigma, self.bound, self.delta = sigma, bound, delta
        self.sample_rate, self.steps, self.accountant = sample_rate, steps, accountant

    @property
    def starts_over(self) -> bool:
        return True

    def check(self, model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if isinstance(layer, _BatchNorm):
                raise GradveilError(
                    f"defense dp cannot bound one example's influence through batch norm (layer {name!r}): build the "
                    "model with batch_norm=false where it has that option, or replace the layer by torch.nn.GroupNorm"
                )
            if isinstance(layer, _NormBase) and layer.track_running_stats:
                raise GradveilError(
                    f"defense dp cannot cover the running statistics of layer {name!r}, which are sent as they are: "
                    "build the layer with track_running_stats=False"
                )

    def prepared(self, start: Step) -> Defense:
        return _Run(self, len(start.batch))

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        mean = clipped_mean(step, self.bound)
        return add(mean, gaussian_like(mean, step.rng), self.sigma * self.bound / len(step.batch))

    def guarantee(self, visits: int = 1) -> Guarantee:
        """That of one reply that visits each example so often; nothing is gained from draws that others know."""
        self.check_steps(visits)
        return self._counted(1.0, visits)

    def described(self) -> Guarantee | None:
        """That of the whole training that ``sample_rate`` and ``steps`` describe, if it draws as they say."""
        if self.sample_rate is None or self.steps is None:
            return None
        return self._counted(self.sample_rate, self.steps)

    def check_steps(self, steps: int) -> None:
        """Refuse what takes an example through more steps than were described."""
        if self.steps is not None and steps > self.steps:
            raise GradveilError(
                f"defense dp: an example takes part in {steps} steps, more than the {self.steps} of the whole training "
                "that sample_rate and steps describe"
            )

    def _counted(self, rate: float, steps: int) -> Guarantee:
        return guarantee(sigma=self.sigma, sample_rate=rate, steps=steps, delta=self.delta, accountant=self.accountant)


class _Run(Defense):
    """One local run: it counts in how many steps each example takes part, and logs what that costs."""

    def __init__(self, defense: DP, examples: int) -> None:
        self.defense = defense
        self.visits = torch.zeros(examples, dtype=torch.int64)

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        places = torch.arange(len(self.visits)) if step.index is None else step.index.cpu()
        self.visits = self.visits.index_add(0, places, torch.ones_like(places))
        return self.defense.on_gradient(gradient, step)

    def on_update(self, update: Params, rng: torch.Generator, log: Log) -> Params:  # noqa: ARG002
        try:
            found = {
                "epsilon": self.defense.guarantee(max(1, int(self.visits.max()))),
                "epsilon_described": self.defense.described(),
            }
        except NotAvailableError:  # the defense works without an accountant; only the numbers are missing
            return update
        for name, one in found.items():
            if one is not None and math.isfinite(one.epsilon):
                log.add(name, one.epsilon)
        return update


@functools.lru_cache(maxsize=256)
def guarantee(
    *, sigma: float, sample_rate: float, steps: int, delta: float = 1e-5, accountant: Accountant = "rdp"
) -> Guarantee:
    """What ``steps`` steps cost, each on examples drawn independently with probability ``sample_rate``.

    Where the prv accountant cannot count, the bound by rdp, which is above it, stands in for it and is named.
    """
    _check_training(sample_rate, steps)
    _check_delta(delta)
    if sigma == 0:
        return Guarantee(math.inf, delta, accountant)
    above = _accounted(sigma, sample_rate, steps, delta, "rdp")
    if accountant == "rdp" or above.epsilon > _COUNTED_FINELY:
        return above
    try:
        return _accounted(sigma, sample_rate, steps, delta, "prv")
    except (RuntimeError, MemoryError):
        return above


def _accounted(sigma: float, sample_rate: float, steps: int, delta: float, accountant: Accountant) -> Guarantee:
    with warnings.catch_warnings():
        # Opacus warns of orders at the end of its list (ours is longer) and of log(0) at sample rate 1 (it is handled).
        warnings.simplefilter("ignore")
        counting, options = _accountant(accountant)
        counting.history = [(sigma, sample_rate, steps)]
        return Guarantee(float(counting.get_epsilon(delta=delta, **options)), delta, accountant)


def _accountant(name: Accountant) -> tuple[Any, dict[str, Any]]:
    """Opacus's accountant of that name, and the options of its ``get_epsilon``."""
    try:
        from opacus.accountants import PRVAccountant, RDPAccountant  # type: ignore[import-untyped]
    except ImportError as error:
        raise NotAvailableError("accounting epsilon needs Opacus: pip install opacus") from error
    if name == "prv":
        return PRVAccountant(), {}
    orders = [*RDPAccountant.DEFAULT_ALPHAS, 64, 128, 256, 512, 1024]
    return RDPAccountant(), {"alphas": orders}


def _check_training(sample_rate: float, steps: int) -> None:
    if not 0 < sample_rate <= 1:
        raise GradveilError(f"defense dp: sample_rate is above 0 and at most 1, not {sample_rate}")
    if steps < 1:
        raise GradveilError(f"defense dp: steps is at least 1, not {steps}")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise GradveilError(f"defense dp: delta is above 0 and below 1, not {delta}")
