"""A defense on an update that is already there: for who trains as before and defends what is sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import differing, digests, is_plain
from gradveil.core.types import Params
from gradveil.defenses import DEFENSES, Defense, Log, Transform, check_result, links_of

_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_transforms(defense: Defense) -> list[Transform]:
    """The links of a defense that needs nothing but the tensors; raises if it needs more."""
    found = []
    for link in links_of(defense):
        if isinstance(link, Transform):
            found.append(link)
        elif type(link) is not Defense:
            raise GradveilError(
                f"{type(link).__name__} needs the client's model and data, not only its update: use gradveil.Client or "
                "gradveil.protect"
            )
    return found


def tied(tree: Params) -> dict[str, str]:
    """For each name whose tensor stands under an earlier name too, bit for bit: that name.

    Such are tied weights in a ``state_dict()``. After a subtraction they no longer share their storage.
    """
    found, alike = {}, defaultdict[tuple[object, ...], list[str]](list)
    for name, tensor in tree.items():
        earlier = alike[tensor.shape, tensor.dtype, tensor.device, *digests([tensor])]
        first = next((one for one in earlier if not differing({"": tree[one]}, {"": tensor})), None)
        if first is None:
            earlier.append(name)
        else:
            found[name] = first
    return found


def defend_update(update: Mapping[str, Tensor], *, defense: str | Defense) -> Params:
    """What to send instead of an update or gradient by name. Whole numbers, such as counters, pass as they are.

    Tensors that are equal bit for bit, such as tied weights, are defended once and sent equal.

    Args:
        update: tensors by name; all of floating point are defended together.
        defense: one that needs nothing but the tensors, such as noise, clipping, sparsification, or a chain of them.

    Raises:
        GradveilError: if the defense needs more than the tensors, or a tensor cannot be defended: complex, sparse,
            quantized, without storage, or not finite.
    """
    links = check_transforms(DEFENSES.build(defense) if isinstance(defense, str) else defense)
    if not isinstance(update, Mapping):
        raise GradveilError(f"an update is a mapping from names to tensors, not {type(update).__name__}")
    moving: Params = {}
    for name, tensor in update.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise GradveilError(f"an update maps names to tensors, not {name!r} to {type(tensor).__name__}")
        if is_plain(tensor):
            moving[name] = tensor.detach().clone()  # a defense of somebody else's may edit what it gets
        elif tensor.dtype not in _WHOLE or tensor.layout != torch.strided or tensor.is_meta:
            raise GradveilError(f"{name!r} cannot be defended: it is not a dense tensor of finite real numbers")
    if not moving:
        raise GradveilError("the update holds no tensor of floating point: nothing of it would be defended")
    # With noise of its own under each name, a mean over the names of tied weights would hold less noise. Tensors that
    # are equal by chance are sent equal too, which shows no more than that. Zeros get noise of their own: equal ones
    # would show which layers did not train, and a mean over them shows nothing but zero.
    twins = tied({name: tensor for name, tensor in moving.items() if tensor.any()})
    rng, log, hidden = Stream.secret(), Log(), moving
    for link in links:
        hidden = link.transform(hidden, rng, log)
        check_result(hidden, moving)
    sent: Params = {}
    for name, tensor in update.items():
        defended = hidden.get(twins.get(name, name))
        sent[name] = tensor.detach().clone() if defended is None else defended.detach().to(tensor.dtype, copy=True)
    return sent
