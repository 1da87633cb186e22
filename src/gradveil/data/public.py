"""Public data of the same kind as private data: another part of the same collection, less all that may be private.

Whoever learns from public data must not learn from private examples, nor from anything that stands in a list beside
them: who is missing in the public data would be known by that alone. So everything that the private data set holds is
left out, by what the images show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from gradveil.assets import is_fetched
from gradveil.core.errors import GradveilError
from gradveil.data.registry import load
from gradveil.data.sets import ImageSet

COLLECTIONS = {"cifar10": (3, 32, 32), "mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28)}
"""Assets with a train and a test split, and the shape of their images. Of equal shapes the first is taken."""
AT_ONCE = 1024
"""Images that are read together."""


def usual_public(data: ImageSet) -> str | None:
    """The spec of public data for private data like these: the other split, or a collection of the same shape.

    None where there is none on this machine: nothing is downloaded for it.
    """
    named = [name for name in COLLECTIONS if data.name in (f"{name}-samples", f"{name} train", f"{name} test")]
    fitting = named or [name for name, shape in COLLECTIONS.items() if shape == data.shape]
    here = [name for name in fitting if is_fetched(name)]
    split = "test" if data.name.endswith(" train") else "train"
    return f"{here[0]}:split={split}" if here else None


@dataclass(frozen=True)
class PublicImages:
    """Public data that is apart from private data, of which it holds digests in no order: they tell nobody anything.

    Called with the spec of a data set, or with None for the usual one, it gives that without every private image.
    """

    usual: str | None
    shape: tuple[int, ...]
    private: frozenset[bytes]

    @classmethod
    def apart_from(cls, data: ImageSet) -> PublicImages:
        return cls(usual_public(data), data.shape, frozenset(_shown(data)))

    def __call__(self, spec: str | None = None) -> ImageSet:
        """The public data that a spec names, or the usual one, without every image that is private.

        Raises:
            GradveilError: if there is none, or its images have another shape.
        """
        spec = self.usual if spec is None else spec
        if spec is None:
            size = " x ".join(map(str, self.shape))
            raise GradveilError(f"there are no public images of {size} here: name a data set of them with public=DATA")
        apart = _kept_apart if spec == self.usual else _apart  # assets do not change, files of the user may
        return apart(spec, self.shape, self.private)


def _apart(spec: str, shape: tuple[int, ...], private: frozenset[bytes]) -> ImageSet:
    public = load(spec)
    if public.shape != shape:
        sizes = [" x ".join(map(str, each)) for each in (public.shape, shape)]
        raise GradveilError(f"public images of {public.name} are {sizes[0]}, the private ones {sizes[1]}")
    return public.subset([place for place, shown in enumerate(_shown(public)) if shown not in private])


_kept_apart = lru_cache(maxsize=1)(_apart)
"""Each attack of an audit asks for the same images, and looking at all of them takes seconds."""


def _shown(data: ImageSet) -> Iterator[bytes]:
    """Of each image a digest of its pixels at 8 bits: the same in another set or in another precision."""
    for start in range(0, len(data), AT_ONCE):
        inputs = data.batch(range(start, min(start + AT_ONCE, len(data)))).inputs
        for image in (inputs * 255).round().to(torch.uint8).cpu().flatten(1).numpy():
            yield hashlib.blake2b(image.tobytes(), digest_size=16).digest()
