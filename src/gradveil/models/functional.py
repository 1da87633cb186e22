"""A module as a pure function of its parameters: what clients train, attacks differentiate and engines batch."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from gradveil.core.errors import GradveilError
from gradveil.core.trees import detached
from gradveil.core.types import Params


class Functional:
    """``outputs = f(params, inputs)`` for one module; safe under vmap, grad and jvp.

    Works on a deep copy: the given module is never edited. In train mode, layers with running statistics use those of
    the batch and forget the running ones, whose in-place update no transform allows. Dropout is refused there: an
    attack that repeats the client's step cannot repeat a draw made inside it.
    """

    def __init__(self, module: nn.Module, *, train_mode: bool = False) -> None:
        self.train_mode = train_mode
        self._module = copy.deepcopy(module).train(train_mode)
        if train_mode:
            _refuse_dropout(self._module)
            _use_batch_statistics(self._module)
        self.params: Params = detached(dict(self._module.named_parameters()))
        """Detached copies of the module's parameters, tied ones once."""
        self.buffers: Params = detached(dict(self._module.named_buffers()))
        """Detached copies of its buffers, such as running statistics in eval mode."""

    def __call__(self, params: Params, inputs: Tensor) -> Tensor:
        """Outputs [n, classes] of the module at ``params``, which must hold every parameter by name."""
        # strict: a parameter that is left out would otherwise silently keep its initial value
        outputs: Tensor = functional_call(self._module, (params, self.buffers), (inputs,), strict=True)
        return outputs


def _refuse_dropout(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", None)
        if isinstance(rate, float) and rate > 0:
            raise GradveilError(
                f"layer {name!r} drops out at random, which no attack can repeat: set its rate to 0 or use eval mode"
            )


def _use_batch_statistics(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
