"""A real local step for tests of defenses: a model, a batch of shipped samples, and its gradient."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import cross_entropy
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Params
from gradveil.defenses import Step
from gradveil.models import Functional


def step_on(
    model: str = "lenet", *, examples: int = 4, seed: int = 0, number: int = 1, lr: float = 0.1, round_number: int = 1
) -> tuple[Params, Step]:
    """The undefended gradient of the first samples on an untrained model, and the step that a defense would see."""
    return step_of(
        models.build(model, SAMPLES.domain, seed=0), SAMPLES.batch(range(examples)), seed, number, lr, round_number
    )


def step_of(
    module: nn.Module, batch: Batch, seed: int = 0, number: int = 1, lr: float = 0.1, round_number: int = 1
) -> tuple[Params, Step]:
    function = Functional(module)
    step = Step(
        model=function, loss=cross_entropy, params=function.params, batch=batch, number=number,
        round_number=round_number, lr=lr, rng=Stream.seeded(seed, "defense"),
    )  # fmt: skip
    return step.gradient(), step


def in_double(step: Step) -> Step:
    """The same step in float64, where rounding moves no example across a kink of the network."""
    module = copy.deepcopy(step.model.module).double()
    params, frozen = ({name: p.double() for name, p in tree.items()} for tree in (step.params, step.frozen))
    batch = Batch(step.batch.inputs.double(), step.batch.labels)
    return replace(step, model=Functional(module, train_mode=None), params=params, frozen=frozen, batch=batch)
