"""Public examples, for defenses and servers that need some: images that anybody may know, and never a private one.

Whoever knows which examples are private says so once, with a :class:`PublicData`. It goes by what an image shows: the
same picture in another set, at another place or in another precision is private too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.data import ImageSet, load

SHIPPED = ("cifar10-samples", "mnist-samples")
SAME = 0.5 / 255
"""Entries of two images that are one differ by less: half a level of 8 bits."""
LOOKED_AT = 64
"""Entries of an image that are compared before all of them are."""
AT_ONCE = 1024
"""Images of a set that are read together."""


@dataclass(frozen=True, eq=False)
class PublicData:
    """All data but these private examples, of all clients."""

    private: Tensor
    """[n, ...]."""

    def last(self, data: ImageSet, count: int) -> Batch:
        """The last ``count`` examples of a set that are not private, in its order, or as many as there are."""
        found = data.batch([])
        for stop in range(len(data), 0, -AT_ONCE):
            some = data.batch(range(max(0, stop - AT_ONCE), stop))
            some = some.take(~occur_in(some.inputs, self.private))
            found = Batch(torch.cat([some.inputs, found.inputs]), torch.cat([some.labels, found.labels]))
            if len(found) >= count:
                break
        return found.take(slice(max(0, len(found) - count), None))


def occur_in(images: Tensor, others: Tensor) -> Tensor:
    """[n]: which images are among others [m, ...]."""
    found = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    if images.shape[1:] != others.shape[1:] or not len(images) or not len(others):
        return found
    rows, known = images.detach().flatten(1).float(), others.detach().flatten(1).to(images.device).float()
    few = slice(None, None, max(1, rows.shape[1] // LOOKED_AT))
    first, second = (torch.cdist(rows[:, few], known[:, few], p=float("inf")) < SAME).nonzero(as_tuple=True)
    same = (rows[first] - known[second]).abs().amax(dim=1) < SAME
    found[first[same]] = True
    return found


def public_images(
    source: str,
    own: Tensor,
    count: int,
    *,
    public: PublicData | None = None,
    label: int | None = None,
    defense: str = "NAME",
) -> Batch:
    """The last public examples of a set, in its order.

    Args:
        source: ``samples`` for the shipped set of this shape, or the spec of a data set.
        count: how many; with ``label`` at most.
        own: examples of the client [n, ...]. The public ones get their shape, type and device.
        public: which data is public; None: nobody has said so, and the client's own examples must not be among them.
        label: only images of this class.
        defense: names the asker in errors.

    Raises:
        GradveilError: if there are not so many public examples of this shape, or one of them is the client's.
    """
    shape = tuple(own.shape[1:])
    if source == "samples":
        fitting = [data for data in map(load, SHIPPED) if data.shape == shape]
        if not fitting:
            raise GradveilError(
                f"defense {defense} needs public images, and no shipped sample is {_shown(shape)}: "
                f"write {defense}:public=DATA"
            )
        data = fitting[0]
    else:
        data = load(source)
    if data.shape != shape:
        raise GradveilError(
            f"defense {defense}: images of {data.name} are {_shown(data.shape)}, the client's are {_shown(shape)}; "
            f"give public images of that shape: write {defense}:public=DATA"
        )
    if label is not None:
        data = data.subset((data.labels == label).nonzero().flatten())
        count = min(count, len(data if public is None else public.last(data, count)))
        if not count:
            raise GradveilError(f"defense {defense}: {data.name} has no public image of class {label}: name another")
    if len(data) < count:
        raise GradveilError(
            f"defense {defense} needs {count} public images but {data.name} has {len(data)}: "
            f"write {defense}:public=DATA with a larger set"
        )
    batch = data.batch(range(len(data) - count, len(data))) if public is None else public.last(data, count)
    if len(batch) < count:
        raise GradveilError(
            f"defense {defense} needs {count} public images but only {len(batch)} of {data.name} are not private: "
            f"write {defense}:public=DATA with another set"
        )
    found = Batch(batch.inputs.to(own), batch.labels.to(own.device))
    refuse_private(found, own, defense)
    return found


def refuse_private(public: Batch, own: Tensor, defense: str) -> None:
    """Raise if an example of the client is among those that pass for public."""
    if occur_in(own, public.inputs).any():
        raise GradveilError(
            f"defense {defense}: the client trains on an image that is among its public ones: write "
            f"{defense}:public=DATA with a set of others"
        )


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
