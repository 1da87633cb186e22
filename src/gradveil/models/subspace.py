"""Any model in a few public directions: what is trained and sent are some hundred coordinates, the rest is public.

The noise of ``veil`` has as many entries as an update. A network of 80,000 numbers drowns in it, 500 coordinates do
not. Directions follow from the seed, or from public photographs, and never from private examples. So a defense has
nothing new to prove: it bounds and hides the gradient in the coordinates, which is all that leaves.
"""

from __future__ import annotations

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.data import load
from gradveil.domains import Images
from gradveil.models.building import MODELS, factory_of
from gradveil.models.features import AT_ONCE, PUBLIC, shown_as

Kind = Literal["random", "public", "layers"]
MOST_ENTRIES = 2**29
"""Of directions, and of gradients of public photographs, that are held at once: 2 GB in float32."""


class Subspace(nn.Module):
    """A model at its start plus coordinates along fixed directions of its parameters."""

    directions: Tensor

    def __init__(self, model: nn.Module, moved: list[str], directions: Tensor) -> None:
        super().__init__()
        self.model, self._moved = model, moved
        self._sizes = [model.get_parameter(name).numel() for name in moved]
        self.register_buffer("directions", directions, persistent=False)  # [D, d]
        self.coordinates = nn.Parameter(torch.zeros(directions.shape[1]))

    def forward(self, inputs: Tensor) -> Tensor:
        away = torch.split(self.directions @ self.coordinates, self._sizes)
        own = dict(self.model.named_parameters())
        parts = zip(self._moved, away, strict=True)
        scores: Tensor = functional_call(
            self.model, {name: own[name] + part.view_as(own[name]) for name, part in parts}, inputs
        )
        return scores


class Adapter(nn.Module):
    """A frozen layer beside itself in few numbers: into ``rank`` channels, a trained square of them, and out again.

    The two ends are fixed and orthonormal, the square starts at zero (LoRA-XS, Balazy et al. 2024).
    """

    def __init__(self, layer: nn.Conv2d | nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, out = layer, layer.weight.shape[0]
        rank = min(rank, out, layer.weight[0].numel())
        if isinstance(layer, nn.Conv2d):
            self.into: nn.Module = nn.Conv2d(
                layer.in_channels, rank, layer.kernel_size, layer.stride, layer.padding, layer.dilation,  # type: ignore[arg-type]
                bias=False,
            )  # fmt: skip
            self.square: nn.Module = nn.Conv2d(rank, rank, 1, bias=False)
            self.out: nn.Module = nn.Conv2d(rank, out, 1, bias=False)
        else:
            self.into, self.square = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, rank, bias=False)
            self.out = nn.Linear(rank, out, bias=False)
        for end in (self.into, self.out):
            nn.init.orthogonal_(end.weight.data)
            end.requires_grad_(False)
        nn.init.zeros_(self.square.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs) + self.out(self.square(self.into(inputs)))
        return scores


@MODELS.register("subspace")
def subspace(
    domain: Images,
    progress: Progress = SILENT,
    *,
    model: str = "resnet8",
    kind: Kind = "random",
    dimensions: int = 512,
    head: bool = True,
) -> nn.Module:
    """Another model in ``dimensions`` public directions (in its options write ; for ,), its last layer trained whole.

    ``random`` directions, those of gradients on ``public`` photographs, or squares of few numbers in all ``layers``.
    """
    name, factory, options = factory_of(model.replace(";", ","))
    if name in ("subspace", "features"):
        raise GradveilError(f"model subspace: {name} sends few numbers already")
    inner = factory(domain, **options).eval()
    return in_subspace(inner, domain, kind=kind, dimensions=dimensions, head=head, progress=progress)


def in_subspace(
    inner: nn.Module,
    domain: Images,
    *,
    kind: Kind = "random",
    dimensions: int = 512,
    head: bool = True,
    progress: Progress = SILENT,
) -> nn.Module:
    """A model, which is changed, in so many directions; torch's global generator draws what is random."""
    if dimensions < 1:
        raise GradveilError(f"model subspace: dimensions is at least 1, not {dimensions}")
    layers = {place: layer for place, layer in inner.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    last = next((place for place in reversed(layers) if isinstance(layers[place], nn.Linear)), None) if head else None
    whole = [] if last is None else [f"{last}.{part}" for part, _ in inner.get_submodule(last).named_parameters()]
    if kind == "layers":
        adapted = {place: layer for place, layer in layers.items() if place != last and _plain(layer)}
        rank = max(1, math.isqrt(dimensions // max(1, len(adapted))))
        inner.requires_grad_(False)
        for place, layer in adapted.items():
            inner.set_submodule(place, Adapter(layer, rank))
        for place in whole:
            inner.get_parameter(place).requires_grad_(True)
        return inner
    moved = [place for place, _ in inner.named_parameters() if place not in whole]
    entries = sum(inner.get_parameter(place).numel() for place in moved)
    if dimensions >= entries or dimensions * entries > MOST_ENTRIES:
        raise GradveilError(
            f"model subspace: {dimensions} directions of {entries:,} numbers are too many: take fewer, or kind=layers"
        )
    if kind == "random":
        directions = torch.randn(entries, dimensions)
    else:
        directions = _public_gradients(inner, moved, domain, progress)
    if directions.shape[1] < dimensions:
        raise GradveilError(f"model subspace: public photographs give {directions.shape[1]} directions at most")
    orthonormal = torch.linalg.qr(directions)[0] if kind == "random" else directions[:, :dimensions]
    for place in moved:
        inner.get_parameter(place).requires_grad_(False)
    return Subspace(inner, moved, orthonormal.contiguous())


def _plain(layer: nn.Module) -> bool:
    """Whether an adapter can stand beside a layer."""
    return isinstance(layer, nn.Linear) or (
        isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.padding_mode == "zeros"
    )


def _public_gradients(model: nn.Module, moved: list[str], domain: Images, progress: Progress) -> Tensor:
    """[D, n]: the directions that gradients of public photographs take most, under labels drawn at random."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = copy.deepcopy(model).to(device)
    every = {name: parameter.detach() for name, parameter in model.named_parameters()}
    own = {name: every[name] for name in moved}
    entries, found = sum(tensor.numel() for tensor in own.values()), []

    def one(params: dict[str, Tensor], shown: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, {**every, **params}, shown[None]), label[None])

    photographs = [load(spec, progress=progress) for spec in PUBLIC]
    if sum(map(len, photographs)) * entries > MOST_ENTRIES:
        raise GradveilError("model subspace: kind=public is for models of fewer numbers: take kind=layers")
    with progress.task("gradients of public photographs", sum(map(len, photographs))) as task:
        for data in photographs:
            for start in range(0, len(data), AT_ONCE):
                shown = shown_as(domain, data.batch(range(start, min(start + AT_ONCE, len(data)))).inputs)
                labels = torch.randint(domain.classes, (len(shown),))
                each = vmap(grad(one), in_dims=(None, 0, 0))(own, shown.to(device), labels.to(device))
                found.append(torch.cat([each[name].flatten(1) for name in moved], dim=1))
                task.advance(len(shown))
    rows = torch.cat(found)
    squares, sides = torch.linalg.eigh(rows.double() @ rows.double().T)  # far smaller than what it is the square of
    kept = squares > 1e-8 * squares[-1]
    directions: Tensor = rows.T @ (sides[:, kept] / squares[kept].sqrt()).float()
    return directions.flip(1).cpu()
