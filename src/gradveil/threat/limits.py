"""What an observation file may ask of whoever opens it: little of it is enough to name much work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gradveil.core.errors import GradveilError
from gradveil.core.registry import split_spec
from gradveil.core.types import Domain, Recipe

LARGEST_OPTION = 2**20
LARGEST_BATCH = 2**28
"""Numbers in the images behind one reply: 87,000 of CIFAR-10, 1,700 of ImageNet."""
MOST_STEPS = 100_000


def check_work(domain: Domain, batch_size: int | None, recipe: Recipe | None) -> None:
    """Refuse more images, or more local steps, than any attack could work on."""
    size = batch_size or 1
    if size * math.prod(domain.shape) > LARGEST_BATCH:
        shape = "x".join(map(str, domain.shape))
        raise GradveilError(
            f"{size:,} images of {shape} are over the {LARGEST_BATCH:,} numbers that a file may ask for"
        )
    if recipe is None:
        return
    per_epoch = -(-size // (recipe.batch_size or size))
    if recipe.epochs * per_epoch > MOST_STEPS:
        raise GradveilError(f"its recipe takes over {MOST_STEPS:,} local steps, more than are repeated for a file")


def check_options(spec: str) -> None:
    """Refuse a model whose options are out of proportion."""
    for key, text in split_spec(spec)[1].items():
        try:
            value = int(text)
        except ValueError:
            continue  # whoever builds the model says what it should be
        if abs(value) > LARGEST_OPTION:
            raise GradveilError(f"its option {key} is {text[:40]}, at most {LARGEST_OPTION:,} is read from a file")


@contextmanager
def at_most(tensors: int) -> Iterator[None]:
    """Stop the building of a model once it has more parameters than the file has tensors.

    A depth of a million costs nothing to write and minutes to build, even without memory. The file has every parameter
    at least twice, as sent and in the replies, so that this leaves room for layers that are replaced on the way.
    """
    built, here = 0, get_ident()

    def count(_module: nn.Module, _name: str, _parameter: nn.Parameter) -> None:
        nonlocal built
        built += get_ident() == here  # the hook is global
        if built > tensors:
            raise GradveilError(f"it has more parameters than the {tensors} tensors of the file")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
