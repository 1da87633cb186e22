"""Many problems through one network: batches that share the weights, each with a gradient of its own."""

from gradveil.joint.agreement import FEW, SAME, agree_nearby, random_inputs, same_gradients
from gradveil.joint.network import Call, SeparateNetwork, SharedNetwork, UnsupportedError, along, gradients

__all__ = [
    "FEW",
    "SAME",
    "Call",
    "SeparateNetwork",
    "SharedNetwork",
    "UnsupportedError",
    "agree_nearby",
    "along",
    "gradients",
    "random_inputs",
    "same_gradients",
]
