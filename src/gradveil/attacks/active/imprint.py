"""Imprint, or "Robbing the Fed" (Fowl et al., ICLR 2022): a layer before the model sorts inputs into bins, one a row.

All rows ask the same number of an input, and row k is active if the answer is above its threshold. The gradient of its
weights is then the sum over those inputs of d x, that of its bias the sum of d, with d the same for all rows: two rows
in turn differ by what lies between their thresholds, and if that is one input, the quotient of the differences is that
input. A hard-tanh that is only active inside the bin needs no differences, and so survives several local steps.
Thresholds part inputs into bins of equal share.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.analytic import entered, filled_up
from gradveil.attacks.base import ATTACKS, Attack, Crafted, Reconstruction, Server
from gradveil.attacks.parts.labels import infer_labels
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.types import Params
from gradveil.domains import Domain
from gradveil.models import Fronted, Imprint, fronted, fronted_spec, split_front
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

Query = Literal["mean", "dct", "random"]
Quantiles = Literal["public", "normal", "laplace"]

WEIGHT, BIAS = "front.query.weight", "front.query.bias"
_ROUNDING = 8
"""Differences of rows of less than so many units in the last place are rounding, not inputs."""
_MOST = 0.75
_GRID = 4096
_TINY = 1e-6
"""Public images may all give the same answer."""


@ATTACKS.register("imprint")
@dataclass(frozen=True, kw_only=True)
class Imprinting(Attack):
    """Imprint (Fowl et al. 2022): a crafted layer before the model sorts inputs into bins that are read off."""

    bins: int = 128
    query: Query = "random"
    quantiles: Quantiles = "normal"
    variant: Literal["fedsgd", "sparse"] = "sparse"
    gain: float = 1e-6
    contrast: float = 1.0

    def __post_init__(self) -> None:
        if self.bins < 3:
            raise GradveilError(f"attack imprint: bins is at least 3, not {self.bins}")
        for option in ("gain", "contrast"):
            if not 0 < (value := getattr(self, option)) < float("inf"):
                raise GradveilError(f"attack imprint: {option} is above 0, not {value}")

    @property
    def requires(self) -> frozenset[Knowledge]:  # type: ignore[override]
        """Public data only where quantiles are taken of them."""
        needed = frozenset({Knowledge.BATCH_SIZE, Knowledge.CRAFT})
        return needed | {Knowledge.PUBLIC_DATA} if self.quantiles == "public" else needed

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:
        """The honest model behind the crafted front; one question is enough."""
        if history:
            return None
        if split_front(server.model)[0] is not None:
            raise GradveilError(f"attack 'imprint' puts a front before the model, and {server.model!r} has one already")
        kind = "relu" if self.variant == "fedsgd" else f"sparse,ceiling={self.gain}"
        front = f"imprint:bins={self.bins},kind={kind}"
        like = next(iter(server.sent.values()))
        parameters = self._parameters(server, seed)
        crafted = {f"front.{name}": tensor.to(like).contiguous() for name, tensor in parameters.items()}
        return Crafted(
            module=fronted(front, copy.deepcopy(server.module), server.domain, seed=seed).to(like.device),
            model=fronted_spec(front, server.model),
            sent={**crafted, **{f"model.{name}": tensor for name, tensor in server.sent.items()}},
            tampered=tuple(crafted),
        )

    def _parameters(self, server: Server, seed: int) -> Params:
        """The parameters of the front: what it passes on is a plain picture, the brighter the larger the answer.

        ``gain`` scales the query down and the return up. The picture stays the same, and the gradient of the query
        grows: it stands out from noise, and from the rounding of parameters in a difference of two.
        """
        public = None if server.public is None else server.public.inputs
        asked = direction(self.query, server.domain, seed)
        ends = edges(asked, self.bins, self.quantiles, server.domain, public)
        below, width = ends[:-1], ends.diff() if self.variant == "sparse" else torch.ones(self.bins).double()
        usual = ends[[1, -2], None]
        active = ((usual - below) / width).clamp(min=0, max=1 if self.variant == "sparse" else None)
        black, white = active.sum(dim=1)
        flat, blank = self.contrast / (white - black), server.domain.blank(1).double().flatten()
        return {
            "query.weight": self.gain * asked.double().flatten() / width[:, None],
            "query.bias": -self.gain * below / width,
            "back.weight": (flat / self.gain).expand(len(blank), self.bins),
            "back.bias": blank - flat * (black + white) / 2,
        }

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        module, size = seen[0].module, seen[0].batch_size or 1
        front = module.front if isinstance(module, Fronted) else None
        if not isinstance(front, Imprint) or WEIGHT not in seen[0].crafted:
            raise GradveilError(
                "attack 'imprint' reads replies to a broadcast that it crafted itself: run it in an audit"
            )
        weight, bias = (torch.stack([one.reply[name] for one in seen]) for name in (WEIGHT, BIAS))
        smallest = _ROUNDING * torch.finfo(bias.dtype).eps * bias.abs().amax(dim=1, keepdim=True)
        if front.ceiling is None:
            # each row less the next one, which has the same inputs but for those in between
            weight, bias = (
                rows - torch.cat([rows[:, 1:], torch.zeros_like(rows[:, :1])], 1) for rows in (weight, bias)
            )
        # Inputs are positive, so the mean over a row is as good a sign of one as its bias, with less noise in it.
        found = (bias.abs() > smallest) * weight.mean(dim=2).abs()
        strongest = found.topk(min(size, found.shape[1]), dim=1)
        rows = strongest.indices
        picked = weight.gather(1, rows[:, :, None].expand(-1, -1, weight.shape[2]))
        pictures = entered(picked, bias.gather(1, rows)).nan_to_num()
        pictures = pictures * _scale(pictures, rows, seen[0].sent, front.ceiling)
        domain = seen[0].domain
        pictures = pictures.where(strongest.values[:, :, None] > 0, domain.blank(1).to(pictures).flatten())
        pictures = domain.valid(pictures.unflatten(-1, domain.shape))  # type: ignore[no-untyped-call]
        inputs = [filled_up(found, size, domain) for found in pictures]
        missing = 1 - (strongest.values > 0).sum(dim=1) / size
        labels = infer_labels(seen, size)
        return [Reconstruction.closed_form(inputs[i], labels[i], float(missing[i])) for i in range(len(seen))]


def _scale(pictures: Tensor, rows: Tensor, sent: Params, ceiling: float | None) -> Tensor:
    """[n, 1, 1]: what to multiply each reply's pictures [n, m, pixels] by, so that they fall into their bins.

    Clipping shortens weights and biases by different factors, and all quotients of a reply by the same. The server
    knows the bin of every picture, so for each an interval of factors; the one sought lies in most of them. It is 1
    unless far more fit another: pictures mixed of several inputs fit anywhere.
    """
    weight, bias = sent[WEIGHT], sent[BIAS]
    ends = torch.cat([-bias[1:], bias.new_full((1,), torch.inf)]) if ceiling is None else ceiling - bias
    answers = (pictures * weight[rows]).sum(dim=2)
    low, high = torch.stack([-bias[rows] / answers, ends[rows] / answers]).sort(dim=0).values.clamp(min=0)
    tried = torch.cat([torch.ones_like(low[:, :1]), low], dim=1)
    fitting = ((low[:, None] <= tried[:, :, None]) & (tried[:, :, None] < high[:, None])).sum(dim=2)
    best, place = fitting.max(dim=1, keepdim=True)
    first = tried.gather(1, place)
    last = high.where(high > first, torch.inf).amin(dim=1, keepdim=True)
    middle = torch.where(last < torch.inf, (first + last) / 2, first)
    return torch.where(fitting[:, :1] >= _MOST * best, 1.0, middle)[:, :, None]


def direction(query: Query, domain: Domain, seed: int) -> Tensor:
    """[*shape]: the number asked of an input is its product with this.

    ``mean`` is the brightness; ``dct`` how much brighter the left side is than the right, the lowest cosine; ``random``
    a direction that is orthogonal to the brightness of every color.
    """
    pixels = math.prod(domain.shape)
    if query == "mean":
        return torch.full(domain.shape, 1 / pixels)
    if query == "dct":
        places = domain.shape[-1]
        wave = torch.cos(math.pi * (torch.arange(places) + 0.5) / places)
        return wave.expand(domain.shape) / pixels
    drawn = torch.randn(domain.shape, generator=generator(seed, "imprint query"))
    centered = drawn - drawn.mean(dim=tuple(range(1, drawn.dim())), keepdim=True)
    return torch.nn.functional.normalize(centered.flatten(), dim=0).view(domain.shape)


def edges(asked: Tensor, bins: int, quantiles: Quantiles, domain: Domain, public: Tensor | None) -> Tensor:
    """[bins + 1], rising: between two of them lies an equal share of inputs, and none in [0, 1] is outside.

    ``asked`` is a direction [*shape], ``public`` are inputs [n, *shape].
    """
    shares = torch.arange(1, bins, dtype=torch.float64) / bins
    if quantiles == "public":
        if public is None or len(public) < 2:
            raise GradveilError("attack 'imprint' needs public images for quantiles=public: or write quantiles=normal")
        inner = _blurred_quantiles((public.cpu() * asked).double().flatten(1).sum(dim=1), shares)
    else:
        center, spread = domain.spread_along(asked.double())
        laplace = (shares - 0.5).sign() * -torch.log1p(-2 * (shares - 0.5).abs()) / math.sqrt(2)  # of variance 1
        inner = center + spread * (torch.special.ndtri(shares) if quantiles == "normal" else laplace)
    least, greatest = asked.clamp(max=0).sum().double(), asked.clamp(min=0).sum().double()
    margin = (greatest - least) / bins  # bins beyond what an input can answer stay empty, but have a width
    first, last = torch.minimum(least, inner[0] - margin), torch.maximum(greatest, inner[-1] + margin)
    return torch.cat([first.view(1), inner, last.view(1)])


def _blurred_quantiles(values: Tensor, shares: Tensor) -> Tensor:
    """Quantiles of few values [n], each blurred by a Gaussian of Silverman's width: bins reach beyond those seen."""
    width = 1.06 * values.std().clamp(min=_TINY) * len(values) ** -0.2
    grid = torch.linspace(float(values.min() - 4 * width), float(values.max() + 4 * width), _GRID, dtype=values.dtype)
    below = torch.special.ndtr((grid[:, None] - values) / width).mean(dim=1)
    after = torch.searchsorted(below, shares).clamp(1, _GRID - 1)
    rest = (shares - below[after - 1]) / (below[after] - below[after - 1])
    return torch.lerp(grid[after - 1], grid[after], rest)
