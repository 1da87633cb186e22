"""Many problems through one network: batches that share the weights, each with a gradient of its own."""

from gradveil.joint.network import Call, SharedNetwork, UnsupportedError, along, gradients

__all__ = ["Call", "SharedNetwork", "UnsupportedError", "along", "gradients"]
