"""Learning to Invert (Wu et al., UAI 2023) against any defense: train a decoder on what the defense itself makes.

The defense is a black box that the adversary can run. It is run on public examples, and a decoder learns to tell the
example from what was sent. What was learned is kept, so that a second audit of the same defense and network costs
nothing. A low score proves nothing: other decoders may do better.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import gradveil
from gradveil import __version__
from gradveil.assets import cache_folder
from gradveil.attacks.base import ATTACKS, Attack, Reconstruction
from gradveil.attacks.identify import RandomChoice, candidates_of, chosen
from gradveil.attacks.parts.candidate_updates import with_labels
from gradveil.attacks.parts.decoder import Decoder, load_decoder, save_decoder, train_decoder
from gradveil.attacks.parts.pairs import Reader, make_pairs
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import Progress
from gradveil.core.trees import stack
from gradveil.core.types import Loss, cross_entropy
from gradveil.data import ImageSet, load
from gradveil.data.public import AT_ONCE, PublicImages
from gradveil.defenses import DEFENSES, Defense, links_of
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

LEAST_PUBLIC = 2000
"""Public examples below which a decoder learns next to nothing."""
KEPT = 8
"""Decoders in memory."""
MOST_FILES = 64
"""Decoders on disk, of some 25 MB each; the oldest goes first."""
_memory: dict[str, tuple[Decoder, Defense | None, Loss, nn.Module]] = {}
"""By digest, the decoder; with the defense, the loss and the model, so that no other object gets their identity."""


@ATTACKS.register("learned")
@dataclass(frozen=True, kw_only=True)
class Learned(Attack):
    """Learning to Invert: a decoder trained on public examples and what the known defense makes of their updates."""

    rank: bool = False
    """Choose among candidates by the embedding that was learned, instead of rebuilding the picture."""
    public: str | None = None
    """The spec of a data set of public examples; none: the other split of the private collection, if it is there."""
    pairs: int | None = None
    """Examples and updates to learn from; none: as many as its cost allows, at most 12,000."""
    keep: bool = True
    """Keep what was learned on disk."""

    def __post_init__(self) -> None:
        if self.pairs is not None and not 400 <= self.pairs <= 10**6:
            raise GradveilError(f"attack learned: pairs is from 400 to 1,000,000, not {self.pairs}")

    @property
    def requires(self) -> frozenset[Knowledge]:  # type: ignore[override]
        needs = frozenset({Knowledge.DEFENSE, Knowledge.RECIPE, Knowledge.PUBLIC_DATA})
        return needs | {Knowledge.CANDIDATES} if self.rank else needs

    def kind_of(self, one: Observation) -> Hashable:
        return one.defense, one.round_number

    def prior_only(self) -> Attack | None:
        return RandomChoice(candidates=None) if self.rank else MeanPicture(public=self.public)

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        one, size = seen[0], seen[0].batch_size or 1
        decoder = self.decoder(one, progress)
        with torch.no_grad():
            entries, statistics = Reader(one.reply)(stack([other.reply for other in seen]))
            read = decoder.read(decoder.reduced(entries), statistics)
            if not self.rank:
                pictures, labels = decoder.pictures(read)
                return [
                    self._rebuilt(one, *each, float(decoder.measured[0])) for each in zip(pictures, labels, strict=True)
                ]
            known = candidates_of(one, None)
            tried = with_labels(known, seen)
            batch = tried.entries.batch(range(len(tried.entries)))
            scores = -decoder.likeness(read, decoder.looks(batch.inputs, batch.labels))
        told = f"learned, {float(decoder.measured[1]):.0%} of held-out public examples found in lists of 100"
        return [
            chosen(known, own, labels, min(size, len(known)), seed, told)
            for own, labels, seed in zip(*tried.best(scores), seeds, strict=True)
        ]

    def decoder(self, one: Observation, progress: Progress) -> Decoder:
        """What was learned about this defense and this broadcast: now, before in this process, or before on disk."""
        public, size = _public(one, self.public), one.batch_size or 1
        digest, named = _digest(one, public, self.pairs), _says_all(one)
        key = digest if named else f"{digest} {id(one.built_defense)} {id(one.loss)} {id(one.module)}"
        if key in _memory:
            return _memory[key][0]
        path = cache_folder() / "learned" / f"{digest}.safetensors"
        decoder = _kept(path, one) if named and self.keep else None
        if decoder is None:
            made = make_pairs(one, public, size, self.pairs, progress)
            device = next(iter(one.sent.values())).device
            decoder = train_decoder(made, one.domain.classes, 0, progress, device)
            if named and self.keep:
                _keep(path, decoder)
        while len(_memory) >= KEPT:
            del _memory[next(iter(_memory))]
        _memory[key] = decoder, one.built_defense, one.loss, one.module
        return decoder

    def _rebuilt(self, one: Observation, picture: Tensor, labels: Tensor, error: float) -> Reconstruction:
        """One picture for all examples behind an update, and as many labels as each is likely to be there."""
        size = one.batch_size or 1
        inputs = one.domain.valid(picture.view(1, *one.domain.shape)).repeat(size, *[1] * len(one.domain.shape))
        expected, guessed = labels.exp() * size, []
        for _ in range(size):
            best = int(expected.argmax())
            expected[best] -= 1
            guessed.append(best)
        found = Reconstruction.closed_form(inputs, torch.tensor(guessed), error)
        return replace(found, strategy=f"learned, mean squared error {error:.4f} on held-out public examples")


@dataclass(frozen=True, kw_only=True)
class MeanPicture(Attack):
    """The mean of public pictures: what a decoder draws without an update."""

    public: str | None
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.PUBLIC_DATA})

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        public = _public(seen[0], self.public)
        mean = public.batch(range(min(len(public), 10_000))).inputs.mean(dim=0, keepdim=True)
        inputs = mean.repeat(seen[0].batch_size or 1, *[1] * (mean.dim() - 1))
        drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
        labels = [torch.randint(seen[0].domain.classes, (len(inputs),), generator=rng) for rng in drawn]
        return [Reconstruction.closed_form(inputs, each, 0.0) for each in labels]


def _public(one: Observation, spec: str | None) -> ImageSet:
    """Public examples, without any that may be private: what the threat model grants, or what the user vouches for."""
    if one.public is not None:
        public = one.public(spec)
    elif spec is not None:
        public = load(spec) if one.candidates is None else PublicImages.apart_from(one.candidates)(spec)
    else:
        raise GradveilError("attack learned: no public examples come with this reply: name others with public=DATA")
    if public.shape != one.domain.shape:
        raise GradveilError(f"attack learned: images of {public.name} are of another shape than the model takes")
    if len(public) < LEAST_PUBLIC:
        raise GradveilError(
            f"attack learned needs {LEAST_PUBLIC:,} public examples that are not private, and {public.name} has "
            f"{len(public):,}: name others with public=DATA"
        )
    return public


def _says_all(one: Observation) -> bool:
    """Whether the digest holds all that a decoder depends on: code of others may change, and so may an object.

    So all classes are ours or torch's, and nothing that can be called was set on a defense or on a layer.
    """
    try:
        links = [(spec, link) for spec, link in one.known_links() if link is not None]
        named = all(link.spec == DEFENSES.build(spec).spec for spec, link in links)
    except GradveilError:  # no spec tells what such an object does
        return False
    parts, layers = [part for _, link in links for part in links_of(link)], list(one.module.modules())
    plain = [vars(part).keys() <= getattr(type(part), "__dataclass_fields__", {}).keys() for part in parts]
    plain += [not callable(value) for layer in layers for value in vars(layer).values()]
    plain += [not hooks for layer in layers for name, hooks in vars(layer).items() if name.endswith("_hooks")]
    ours = [type(each).__module__.startswith(("gradveil.", "torch.nn.")) for each in (*parts, *layers)]
    return named and len(links) == len(one.known_links()) and one.loss is cross_entropy and all((*plain, *ours))


@cache
def _code() -> str:
    """Of all that Gradveil does: a defense of another version, or that somebody is working on, has other decoders."""
    found = hashlib.sha256(__version__.encode())
    for path in sorted(Path(gradveil.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _digest(one: Observation, public: ImageSet, pairs: int | None) -> str:
    """Of all that a decoder depends on, but the code of others."""
    facts = [_code(), torch.__version__, pairs, one.batch_size, one.kind, one.defense, repr(one.recipe)]
    facts += [one.round_number, repr(one.domain), repr(one.module)]
    for layer in one.module.modules():  # what it shows is not all: attention does not show how many heads it has
        facts.append(repr([item for item in vars(layer).items() if isinstance(item[1], int | float | str | tuple)]))
    found = hashlib.sha256(json.dumps(facts).encode())
    agreed = {name: tensor for name, tensor in one.module.state_dict().items() if name not in one.sent}
    for name, tensor in {**one.sent, **agreed}.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for start in range(0, len(public), AT_ONCE):
        batch = public.batch(range(start, min(start + AT_ONCE, len(public))))
        found.update((batch.inputs * 255).round().byte().cpu().numpy().tobytes() + batch.labels.numpy().tobytes())
    return found.hexdigest()


def _keep(path: Path, decoder: Decoder) -> None:
    """Save it for other audits. Where that cannot be, as on a full disk, this one goes on with what it has."""
    with contextlib.suppress(GradveilError, OSError):
        save_decoder(path, decoder)
        files = sorted(path.parent.glob("*.safetensors"), key=lambda one: one.stat().st_mtime)
        for old in files[:-MOST_FILES]:
            old.unlink(missing_ok=True)


def _kept(path: Path, one: Observation) -> Decoder | None:
    """The decoder that an earlier audit kept; None if there is none, or its file is damaged: it is made again."""
    if not os.path.isfile(path):  # unlike Path.is_file, it raises nothing where the folder is closed
        return None
    entries, statistics = Reader(one.reply)({name: tensor[None] for name, tensor in one.reply.items()})
    sizes = {"entries": entries.shape[1], "statistics": statistics.shape[1]}
    sizes |= {"pixels": math.prod(one.domain.shape), "classes": one.domain.classes}
    try:
        return load_decoder(path, sizes)
    except BadFileError:
        return None
