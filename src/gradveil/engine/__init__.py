"""Many at once: problems of one network, examples of one batch, clients of one round; each fast way checked once."""

from gradveil.engine.agreement import agree, is_rounding, same_tensors
from gradveil.engine.clients import Gradient, Request, Runner, SideBySide
from gradveil.engine.examples import (
    LocalLoss,
    cached,
    copied_loss,
    example_gradients,
    example_pass,
    shared_gradients,
    trained_gradients,
    why_not_shared,
)
from gradveil.engine.graphs import CudaGraphCache, Evaluate, cuda_settings, forward_mode, without_tf32
from gradveil.engine.network import LayerPass, SeparateNetwork, SharedNetwork, along, gradients
from gradveil.engine.strategy import Batched, Given, Plan, Precision, Single, Strategy, bound, plan_for, ways_of

__all__ = [
    "Batched",
    "CudaGraphCache",
    "Evaluate",
    "Given",
    "Gradient",
    "LayerPass",
    "LocalLoss",
    "Plan",
    "Precision",
    "Request",
    "Runner",
    "SeparateNetwork",
    "SharedNetwork",
    "SideBySide",
    "Single",
    "Strategy",
    "agree",
    "along",
    "bound",
    "cached",
    "copied_loss",
    "cuda_settings",
    "example_gradients",
    "example_pass",
    "forward_mode",
    "gradients",
    "is_rounding",
    "plan_for",
    "same_tensors",
    "shared_gradients",
    "trained_gradients",
    "ways_of",
    "why_not_shared",
    "without_tf32",
]
