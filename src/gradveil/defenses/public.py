"""Public examples for defenses that need some: images that anybody may know, never the client's own."""

from __future__ import annotations

from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.data import ImageSet, load

SHIPPED = ("cifar10-samples", "mnist-samples")


def public_images(source: str, like: Tensor, count: int, *, defense: str = "NAME") -> Batch:
    """``count`` public examples of the shape, type and device of ``like`` [n, C, H, W].

    ``source`` is ``samples`` for the shipped set that has this shape, or the spec of a data set. Examples are the last
    of the set, in its order: audits take private images from its start. ``defense`` names the asker in errors.
    """
    shape = tuple(like.shape[1:])
    found = _shipped(shape, defense) if source == "samples" else load(source)
    if found.shape != shape:
        raise GradveilError(
            f"defense {defense}: images of {found.name} are {_shown(found.shape)}, the client's are {_shown(shape)}; "
            f"give public images of that shape: write {defense}:public=DATA"
        )
    if len(found) < count:
        raise GradveilError(
            f"defense {defense} needs {count} public images but {found.name} has {len(found)}: "
            f"write {defense}:public=DATA with a larger set"
        )
    batch = found.batch(range(len(found) - count, len(found)))
    return Batch(batch.inputs.to(like), batch.labels.to(like.device))


def _shipped(shape: tuple[int, ...], defense: str) -> ImageSet:
    for name in SHIPPED:
        samples = load(name)
        if samples.shape == shape:
            return samples
    raise GradveilError(
        f"defense {defense} needs public images, and no shipped sample is {_shown(shape)}: write {defense}:public=DATA"
    )


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
