"""A decoder from defended updates to examples, as Learning to Invert trains one (Wu et al., UAI 2023).

Two models read an update: one its entries and the statistics of its tensors, one the statistics alone, which entries
that are noise would drown. Each gives a code of the picture, the labels, and an embedding in which the example behind
the update is near. Pairs that were held out of the training decide which of them counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.attacks.parts.pairs import Pairs
from gradveil.core.errors import BadFileError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator, isolated
from gradveil.core.tensor_files import Shapes, read_tensors, write_tensors
from gradveil.core.types import Json

KIND = "learned decoder"
COMPONENTS, DIRECTIONS = 256, 256
"""An update is reduced to so many principal components, and so many directions in which it goes with the picture."""
FITTED = 4096
"""Updates that principal components are fitted on."""
CODE, LOOKS = 64, 256
"""Principal components of pictures: of a picture that is rebuilt, and of one that is looked for."""
EMBEDDED = 64
WIDTH = {"entries": 512, "norms": 256}
BATCH = 256
RATE = 1e-3
PICTURE, LABEL = 4.0, 0.3
"""How much the error of the picture and of the labels counts beside that of the embedding."""
EPOCHS = {"entries": 8, "norms": 12}
"""Passes over the pairs, by model. That of norms has few inputs, and a pass of it takes little."""
STEPS = 250
"""At least so many steps: of few pairs there are more passes."""
HELD_OUT = 1000
LIST = 100
"""Length of the lists in which held-out pairs are looked for."""
LARGEST = 2**24
"""No size in a file is larger."""
FAINT = 0.02
"""Components of pictures whose deviation is a smaller share of the largest are not blown up."""
CLIPPED = 8.0
"""Deviations beyond which a number is cut off."""


@dataclass(frozen=True)
class Sizes:
    """What a decoder's tensors depend on."""

    entries: int
    statistics: int
    pixels: int
    classes: int
    components: int
    directions: int
    looks: int


class Body(nn.Module):
    """One model of an update, with what it says about the example, and the embedding of examples that goes with it."""

    def __init__(self, inputs: int, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)
        )
        self.code = nn.Linear(width, min(CODE, sizes.looks))
        self.label = nn.Linear(width, sizes.classes)
        self.embedding = nn.Linear(width, EMBEDDED)
        self.example = nn.Sequential(
            nn.Linear(sizes.looks + sizes.classes, width), nn.GELU(), nn.Linear(width, EMBEDDED)
        )
        self.sharpness = nn.Parameter(torch.tensor(2.0))

    def likeness(self, hidden: Tensor, looks: Tensor) -> Tensor:
        """[n, m]: how well each of m examples fits each of n updates."""
        own, others = F.normalize(self.embedding(hidden), dim=1), F.normalize(self.example(looks), dim=1)
        return self.sharpness.exp() * own @ others.T


class Decoder(nn.Module):
    """Both models and the fixed linear maps before and after them."""

    bodies: nn.ModuleDict
    entry_mean: Tensor
    entry_scale: Tensor
    reduction: Tensor
    reduced_scale: Tensor
    statistic_mean: Tensor
    statistic_scale: Tensor
    picture_mean: Tensor
    picture_axes: Tensor
    look_scale: Tensor
    weights: Tensor
    """[2, 2]: how much each model counts, for pictures (first row) and for lists."""
    measured: Tensor
    """[2]: the mean squared error and the share recognised, on held-out pairs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, reduced = sizes, sizes.components + sizes.directions
        for name, shape in {
            "entry_mean": [sizes.entries], "entry_scale": [sizes.entries], "reduction": [sizes.entries, reduced],
            "reduced_scale": [reduced], "statistic_mean": [sizes.statistics], "statistic_scale": [sizes.statistics],
            "picture_mean": [sizes.pixels], "picture_axes": [sizes.pixels, sizes.looks], "look_scale": [sizes.looks],
            "weights": [2, 2], "measured": [2],
        }.items():  # fmt: skip
            self.register_buffer(name, torch.zeros(shape))
        inputs = {"entries": reduced + sizes.statistics, "norms": sizes.statistics}
        self.bodies = nn.ModuleDict({name: Body(count, WIDTH[name], sizes) for name, count in inputs.items()})

    @property
    def models(self) -> dict[str, Body]:
        return cast("dict[str, Body]", dict(self.bodies.items()))

    def fit_maps(self, pairs: Pairs, kept: int, rng: torch.Generator) -> Tensor:
        """Fit the linear maps, and return the standardised entries.

        The first ``kept`` pairs are held out: directions of so many entries fit any pairs, even those of pure noise.
        """
        pixels, statistics = pairs.inputs[kept:].flatten(2).mean(dim=1).float(), pairs.statistics[kept:]
        self.picture_mean = pairs.inputs[kept:].flatten(0, 1).flatten(1).float().mean(dim=0)
        some = pixels[:FITTED] - self.picture_mean
        self.picture_axes = _leading(some, self.sizes.looks, rng)
        looks = (pixels - self.picture_mean) @ self.picture_axes
        deviations = looks.std(dim=0)  # what hardly varies is rounding, and must not count as much as the rest
        self.look_scale = 1 / deviations.clamp(min=float(FAINT * deviations.max()) + 1e-12)
        self.statistic_mean, self.statistic_scale = statistics.mean(0), _inverse_deviation(statistics)
        self.entry_mean, self.entry_scale = pairs.entries[kept:].mean(dim=0), _inverse_deviation(pairs.entries[kept:])
        entries = pairs.entries.sub_(self.entry_mean).mul_(self.entry_scale).clamp_(-CLIPPED, CLIPPED)
        along = entries[kept:].T @ (looks * self.look_scale)[:, : self.sizes.directions]
        components = _leading(entries[kept : kept + FITTED], self.sizes.components, rng)
        self.reduction = torch.cat([components, F.normalize(along, dim=0)], dim=1)
        return entries

    def read(self, reduced: Tensor, statistics: Tensor) -> dict[str, Tensor]:
        """What each model takes, by its name, of reduced entries and of statistics as they are."""
        own = ((statistics - self.statistic_mean) * self.statistic_scale).clamp(-CLIPPED, CLIPPED)
        return {"entries": torch.cat([reduced * self.reduced_scale, own], dim=1), "norms": own}

    def reduced(self, entries: Tensor) -> Tensor:
        standard = ((entries - self.entry_mean) * self.entry_scale).clamp(-CLIPPED, CLIPPED)
        return standard @ self.reduction

    def looks(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """[m, looks + classes] of examples [m, ...]: what embeddings are made of."""
        pictures = (inputs.flatten(1).float() - self.picture_mean) @ self.picture_axes * self.look_scale
        return torch.cat([pictures, F.one_hot(labels, self.sizes.classes).float()], dim=1)

    def likeness(self, read: dict[str, Tensor], looks: Tensor, weights: Tensor | None = None) -> Tensor:
        """[n, m]: how well examples fit updates."""
        weights = self.weights[1] if weights is None else weights
        parts = [body.likeness(body.layers(read[name]), looks) for name, body in self.models.items()]
        return weights[0] * parts[0] + weights[1] * parts[1]

    def pictures(self, read: dict[str, Tensor], weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pictures [n, pixels] and log-probabilities of labels [n, classes]; of several examples the mean."""
        weights = self.weights[0] if weights is None else weights
        hidden = [(body, body.layers(read[name])) for name, body in self.models.items()]
        codes = torch.stack([body.code(own) for body, own in hidden], dim=-1) @ weights
        labels = torch.stack([body.label(own) for body, own in hidden], dim=-1) @ weights
        codes = codes / self.look_scale[: codes.shape[1]].clamp(min=1e-12)
        return codes @ self.picture_axes[:, : codes.shape[1]].T + self.picture_mean, labels.log_softmax(dim=1)


def _inverse_deviation(rows: Tensor) -> Tensor:
    """Of each column; 0 of one that is constant up to rounding, which tells nothing."""
    deviation = rows.std(dim=0)
    return torch.where(deviation > 1e-5 * rows.abs().amax(dim=0) + 1e-12, 1 / deviation.clamp(min=1e-12), 0.0)


def _leading(rows: Tensor, count: int, rng: torch.Generator, passes: int = 2) -> Tensor:
    """[columns, count]: leading right singular vectors of [n, columns], by a randomised range finder."""
    sketch = torch.randn(rows.shape[1], count, generator=rng).to(rows.device)
    for _ in range(passes):
        sketch = torch.linalg.qr(rows.T @ (rows @ sketch)).Q
    _, _, turned = torch.linalg.svd(rows @ sketch, full_matrices=False)
    found: Tensor = sketch @ turned.T
    return found


def train_decoder(pairs: Pairs, classes: int, seed: int, progress: Progress, device: torch.device) -> Decoder:
    """Fit the maps, train both models, and decide by held-out pairs which counts."""
    count, size = pairs.labels.shape
    pixels, rng = pairs.inputs[0, 0].numel(), generator(seed, "learned training")
    columns, kept = pairs.entries.shape[1], max(2 * LIST, min(HELD_OUT, count // 8))
    sizes = Sizes(
        entries=columns, statistics=pairs.statistics.shape[1], pixels=pixels, classes=classes,
        components=min(COMPONENTS, columns, FITTED, count - kept),
        directions=min(DIRECTIONS, LOOKS, pixels, count - kept), looks=min(LOOKS, pixels, FITTED, count - kept),
    )  # fmt: skip
    with isolated(seed, "learned weights"):
        decoder = Decoder(sizes)
    reduced = decoder.fit_maps(pairs, kept, rng) @ decoder.reduction
    decoder.reduced_scale = _inverse_deviation(reduced[kept:])
    decoder, reduced = decoder.to(device), reduced.to(device)
    read = decoder.read(reduced, pairs.statistics.to(device))
    looks = decoder.looks(pairs.inputs.flatten(0, 1).to(device), pairs.labels.flatten().to(device))
    looks = looks.view(count, size, -1)
    shares = decoder.look_scale[: min(CODE, sizes.looks)].clamp(min=1e-12) ** -2
    shares = shares / shares.sum()
    epochs = {name: max(own, STEPS * BATCH // (count - kept)) for name, own in EPOCHS.items()}
    with (
        progress.task("learned: training", sum(epochs.values())) as task,
        isolated(seed, "learned dropout", device=device),  # dropout draws where the decoder is
        torch.enable_grad(),
    ):
        for name, body in decoder.models.items():
            for _ in _epochs(body, read[name][kept:], looks[kept:], shares, epochs[name], rng):
                task.advance()
    decoder.eval().requires_grad_(False)
    held = {name: own[:kept] for name, own in read.items()}
    _choose(decoder, held, looks[:kept], pairs.inputs[:kept].to(device).flatten(2).mean(dim=1), rng)
    return decoder.cpu()


def _epochs(
    body: Body, read: Tensor, looks: Tensor, shares: Tensor, epochs: int, rng: torch.Generator
) -> Iterator[None]:
    """Train one model: the code by squared error, the labels, and the embedding against other examples of a batch.

    ``shares`` [code] say how much of a picture's variance each number of the code stands for.
    """
    classes = body.label.out_features
    per_epoch = max(1, len(read) // BATCH)
    optimiser = torch.optim.AdamW(body.parameters(), lr=RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=epochs * per_epoch + 1)
    body.train()
    for _ in range(epochs):
        order = torch.randperm(len(read), generator=rng)
        for start in range(0, per_epoch * BATCH, BATCH):
            places = order[start : start + BATCH].to(read.device)
            member = torch.randint(looks.shape[1], (), generator=rng)
            own, mean = looks[places, member], looks[places].mean(dim=1)
            hidden = body.layers(read[places])
            logits, right = body.likeness(hidden, own), torch.arange(len(places), device=read.device)
            loss = F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)
            away = (body.code(hidden) - mean[:, : len(shares)]).square() @ shares
            loss = loss + PICTURE * away.mean() + LABEL * F.cross_entropy(body.label(hidden), mean[:, -classes:])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(body.parameters(), 1.0)
            optimiser.step()
            schedule.step()
        yield


def _choose(decoder: Decoder, held: dict[str, Tensor], looks: Tensor, pictures: Tensor, rng: torch.Generator) -> None:
    """Which model counts, or both: the lowest error of pictures, and most held-out examples first in their lists."""
    ways = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], device=looks.device)
    errors = [float((decoder.pictures(held, way)[0].clamp(0, 1) - pictures).square().mean()) for way in ways]
    others = torch.stack([torch.randperm(len(looks), generator=rng)[: LIST - 1] for _ in range(len(looks))])
    others = others.to(looks.device)
    own = torch.arange(len(looks), device=looks.device)
    shares = []
    for way in 2 * ways:
        likeness = decoder.likeness(held, looks[:, 0], way)
        before = (likeness.gather(1, others) > likeness.diagonal()[:, None]) & (others != own[:, None])
        # One that all examples fit alike is not recognised.
        alike = (likeness.gather(1, others) == likeness.diagonal()[:, None]) & (others != own[:, None])
        shares.append(float((~before.any(dim=1) / (1 + alike.sum(dim=1))).mean()))
    best = min(range(3), key=errors.__getitem__), max(range(3), key=shares.__getitem__)
    decoder.weights = torch.stack([ways[best[0]], 2 * ways[best[1]]])
    decoder.measured = torch.tensor([errors[best[0]], shares[best[1]]], device=looks.device)


def save_decoder(path: Path, decoder: Decoder) -> None:
    """Write what was learned, for its owner alone."""
    write_tensors(path, KIND, decoder.state_dict(), {"sizes": asdict(decoder.sizes)})


def load_decoder(path: Path, expected: Mapping[str, int]) -> Decoder:
    """The decoder of a file. It is hostile until checked: sizes and shapes are compared before anything is loaded.

    ``expected`` are the sizes that the network and the data fix, by name.
    """

    def check(meta: Json, shapes: Shapes) -> None:
        sizes = meta.get("sizes")
        if not isinstance(sizes, dict) or sizes.keys() != Sizes.__dataclass_fields__.keys():
            raise BadFileError(f"{path}: its header names no decoder")
        if any(type(value) is not int or not 0 < value <= LARGEST for value in sizes.values()):
            raise BadFileError(f"{path}: its header has an impossible size")
        if any(sizes[name] != value for name, value in expected.items()):
            raise BadFileError(f"{path} is of another network")
        with torch.device("meta"):
            wanted = {name: tuple(tensor.shape) for name, tensor in Decoder(Sizes(**sizes)).state_dict().items()}
        if wanted != shapes:
            raise BadFileError(f"{path}: its tensors do not fit the sizes that its header names")

    tensors, meta = read_tensors(path, KIND, check=check, max_bytes=2**30)
    decoder = Decoder(Sizes(**meta["sizes"]))
    decoder.load_state_dict(tensors)
    return decoder.eval().requires_grad_(False)
