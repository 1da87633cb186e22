"""A linear head on frozen public features: few numbers leave a client, so that noise which hides them costs little.

Backbones are trained on public pictures, and what is fitted to them here is fitted to public photographs. Nothing of
private data is in them, and clients neither train nor send them.
"""

from __future__ import annotations

import contextlib
import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.assets import cache_folder, lookup
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import find
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.data import ImageSet, load
from gradveil.domains import Images
from gradveil.models.building import MODELS
from gradveil.models.efficientnet import SIZES, EfficientNetLite
from gradveil.models.scattering import SIDE, Scattering

PUBLIC = ("photos-64", "open-images:size=120")
"""Photographs that the directions of features are fitted to."""
NO_WEIGHTS = "scattering"
"""The backbone that nobody trained."""
MOST_DIRECTIONS = 1024
AT_ONCE = 64
KEPT_FROM = 256
"""Features of data sets of at least this many examples are kept for the next time."""
FEW = 128
"""Photographs that are enough for a mean; directions take all of them."""
_KIND = "public features"


class Resize(nn.Module):
    """Pictures [n, C, H, W] to [n, 3, side, side] by bicubic filters, as two matrix products.

    Torch's own way is neither safe under vmap nor, on a GPU, the same each time when it is differentiated.
    """

    down: Tensor
    across: Tensor

    def __init__(self, height: int, width: int, side: int) -> None:
        super().__init__()
        for name, length in (("down", height), ("across", width)):
            each = torch.eye(length)[None, None]
            filters = F.interpolate(each, size=(side, length), mode="bicubic", antialias=True)[0, 0]
            self.register_buffer(name, filters, persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        colored = pictures.expand(*pictures.shape[:-3], 3, *pictures.shape[-2:])
        return self.down @ colored @ self.across.T


class Backbones(nn.Module):
    """Pictures to what public networks see in them, each at its own size: [n, 1280 or more], unit length of each.

    With ``mirror`` it is the mean of what they see in a picture and in its mirror image.
    """

    def __init__(
        self, names: tuple[str, ...], domain: Images, *, mirror: bool = False, progress: Progress = SILENT
    ) -> None:
        super().__init__()
        self.mirror = mirror
        self.networks = nn.ModuleList(
            Scattering() if name == NO_WEIGHTS else EfficientNetLite(name, progress=progress) for name in names
        )
        sides = (SIDE if name == NO_WEIGHTS else SIZES[name] for name in names)
        self.resize = nn.ModuleList(Resize(domain.height, domain.width, side) for side in sides)

    def forward(self, pictures: Tensor) -> Tensor:
        found = []
        for network, resize in zip(self.networks, self.resize, strict=True):
            shown = resize(pictures)
            seen = F.normalize(network(shown), dim=-1)
            found.append((seen + F.normalize(network(shown.flip(-1)), dim=-1)) / 2 if self.mirror else seen)
        return torch.cat(found, dim=-1)


class FeatureHead(nn.Module):
    """The trained part of :class:`PublicFeatures` under the same names: features [n, d] to scores [n, classes]."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(features)
        return scores


class PublicFeatures(nn.Module):
    """Public features of unit length under one trainable linear layer.

    What ``encode`` gives can be computed once and be given to ``forward`` in place of the pictures.
    """

    mean: Tensor
    directions: Tensor

    def __init__(
        self,
        domain: Images,
        names: tuple[str, ...],
        *,
        pca: int,
        whiten: float,
        mirror: bool = False,
        bias: bool = True,
        progress: Progress = SILENT,
    ) -> None:
        super().__init__()
        self.key = f"{'+'.join(map(_digest, names))} {pca} {whiten:g} {mirror}"
        """What the features follow from, beside the pictures."""
        self.backbones = Backbones(names, domain, mirror=mirror, progress=progress)
        mean, directions = public_directions(names, domain, mirror, pca, whiten, progress)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("directions", directions, persistent=False)
        self.head = nn.Linear(directions.shape[1], domain.classes, bias=bias)
        for parameter in self.head.parameters():  # the loss is convex: there is no better place to start
            nn.init.zeros_(parameter)

    def encode(self, pictures: Tensor) -> Tensor:
        """Pictures [n, C, H, W] in [0, 1] to features [n, d] of unit length."""
        return self.project(self.backbones(pictures))

    def project(self, seen: Tensor) -> Tensor:
        """What networks see [n, D] to features [n, d] of unit length."""
        return F.normalize((seen - self.mean) @ self.directions, dim=-1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores [n, classes] of pictures, or of what ``encode`` made of them."""
        scores: Tensor = self.head(inputs if inputs.dim() == 2 else self.encode(inputs))
        return scores

    def alone(self) -> FeatureHead:
        """The head without backbones, for who has features already: copies and calls of it cost little."""
        return FeatureHead(self.head)


@torch.no_grad()
def encoded(model: PublicFeatures, data: ImageSet, *, progress: Progress = SILENT) -> Tensor:
    """[n, d]: the features of a whole data set, where the model is.

    They say as much as the pictures: those of larger sets are kept in files that only their owner can read.
    """
    device, seen = model.mean.device, hashlib.sha256(f"{model.key} {len(data)} {tuple(data.shape)}".encode())
    for part in (model.mean, model.directions) if len(data) >= KEPT_FROM else ():
        seen.update(part.cpu().numpy().tobytes())
    starts = range(0, len(data), AT_ONCE)
    for start in starts if len(data) >= KEPT_FROM else ():
        seen.update(data.batch(range(start, min(start + AT_ONCE, len(data)))).inputs.cpu().numpy().tobytes())
    path = cache_folder() / "private" / f"features-{seen.hexdigest()[:24]}.safetensors"
    if len(data) >= KEPT_FROM:
        with contextlib.suppress(GradveilError, OSError):  # none yet, or damaged: computed anew
            kept = read_tensors(path, _KIND)[0].get("features", model.mean)
            fits = kept.shape == (len(data), model.head.in_features) and kept.dtype == model.mean.dtype
            if fits and bool(((kept.norm(dim=1) - 1).abs() < 1e-3).all()):
                return kept.to(device)
    with progress.task("public features", len(data)) as task:
        parts = []
        for start in starts:
            batch = data.batch(range(start, min(start + AT_ONCE, len(data)))).to(device)
            parts.append(model.encode(batch.inputs))
            task.advance(len(batch))
    features = torch.cat(parts)
    if len(data) >= KEPT_FROM:
        with contextlib.suppress(GradveilError, OSError):  # where nothing can be kept they are computed again
            write_tensors(path, _KIND, {"features": features}, {})
    return features


def public_directions(
    names: tuple[str, ...], domain: Images, mirror: bool, pca: int, whiten: float, progress: Progress
) -> tuple[Tensor, Tensor]:
    """The mean of public photographs, [D], and the directions that are kept, [D, d].

    ``pca`` of them, the longest first, each divided by its length to the power ``whiten``; with 0 all as they are. They
    are computed once and kept in the cache of assets. Photographs are shown at the size of the domain's pictures, and
    grey where these are: networks see something else in what is sharper.
    """
    count = None if pca else FEW
    shape = f"{domain.channels}x{domain.height}x{domain.width}"
    key = "\n".join([*map(_digest, names), *PUBLIC, str(count), shape, str(mirror)])
    path = cache_folder() / f"public-features-{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
    if not path.exists():
        seen = _public(Backbones(names, domain, mirror=mirror), domain, count, progress).double()
        mean = seen.mean(dim=0)
        _, lengths, directions = torch.linalg.svd(seen - mean, full_matrices=False)
        # Either sign of a direction is as good: one that no machine decides for itself.
        directions = directions * directions.gather(1, directions.abs().argmax(dim=1, keepdim=True)).sign()
        kept = {"mean": mean, "lengths": lengths[:MOST_DIRECTIONS], "directions": directions[:MOST_DIRECTIONS]}
        write_tensors(path, _KIND, {name: tensor.float() for name, tensor in kept.items()}, {"networks": list(names)})
    found, _ = read_tensors(path, _KIND)
    if pca == 0:
        return found["mean"], torch.eye(len(found["mean"]))
    if pca > len(found["lengths"]):
        raise GradveilError(f"model features: pca is at most {len(found['lengths'])}, not {pca}")
    lengths = (found["lengths"][:pca] / found["lengths"][0]) ** whiten
    return found["mean"], found["directions"][:pca].T / lengths


def _digest(name: str) -> str:
    return name if name == NO_WEIGHTS else lookup(name).archive_sha256


def shown_as(domain: Images, photographs: Tensor) -> Tensor:
    """Photographs [n, 3, ...] at the size of a domain's pictures, and grey where these are."""
    shown = photographs if domain.channels == 3 else photographs.mean(dim=1, keepdim=True)
    return F.interpolate(shown, size=(domain.height, domain.width), mode="bicubic", antialias=True).clamp(0, 1)


@torch.no_grad()
def _public(backbones: Backbones, domain: Images, count: int | None, progress: Progress) -> Tensor:
    """[n, D]: what networks see in the first ``count`` public photographs, or in all; on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    photographs = [load(spec, progress=progress) for spec in PUBLIC]
    each = [data.subset(range(len(data))[: count and count // len(photographs)]) for data in photographs]
    backbones, found = backbones.to(device), []
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False  # all machines should see the same
    try:
        with progress.task("features of public photographs, once", sum(map(len, each))) as task:
            for data in each:
                for start in range(0, len(data), AT_ONCE):
                    shown = shown_as(domain, data.batch(range(start, min(start + AT_ONCE, len(data)))).inputs)
                    found.append(backbones(shown.to(device)).cpu())
                    task.advance(len(shown))
    finally:
        torch.backends.cudnn.allow_tf32 = before
    return torch.cat(found)


@MODELS.register("features")
def features(
    domain: Images,
    progress: Progress = SILENT,
    *,
    backbone: str = "efficientnet-lite0",
    pca: int = 0,
    whiten: float = 0.5,
    mirror: bool = False,
    bias: bool = True,
) -> PublicFeatures:
    """Linear head on frozen public features; ``backbone`` names networks joined by +, ``pca`` public directions."""
    names = tuple(part.strip() for part in backbone.split("+"))
    for name in names:
        find("backbone", name, {**SIZES, NO_WEIGHTS: SIDE})
    if domain.channels not in (1, 3):
        raise GradveilError(f"model features takes grey or colored pictures, not {domain.channels} channels")
    if pca < 0 or not 0 <= whiten <= 1:
        raise GradveilError("model features: pca is at least 0, and whiten from 0 to 1")
    return PublicFeatures(domain, names, pca=pca, whiten=whiten, mirror=mirror, bias=bias, progress=progress)
