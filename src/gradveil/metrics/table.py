"""The one table of metrics: what each is called, how it is written, which way it points and what it means.

A new metric is a function in one of the files beside this one, and here an entry and a field; one from outside is a
function with :func:`register_metric`. Audits, reports and the command line follow. Nothing here loads torch: reports
are made without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from torch import Tensor

Measure = TypeVar("Measure", bound=Callable[..., Any])

NOT_AVAILABLE = "n/a"
PERCENT = "percent"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A measured figure of a reconstruction."""

    name: str
    title: str
    unit: str = ""
    direction: Literal["higher", "lower"]
    """Where more is revealed."""
    style: str = ".3f"
    """A format, or "percent" for a share."""
    meaning: str = ""
    """For the reader of a report; empty for a metric that is recorded for single images alone."""
    in_summary: str = ""
    """The heading of its column in the summary on the command line; empty where it has none."""
    function: str | Callable[[Tensor, Tensor], Tensor] = ""
    """What takes two sets of images [n, C, H, W] and gives one number per pair, [n]; or its ``module:name``."""
    failed: float | None = None
    """What a guess that is no picture scores: the worst that images in [0, 1] can or, without a bound, 1."""

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def format(self, value: float | None) -> str:
        return styled(value, self.style)

    def load(self) -> Callable[[Tensor, Tensor], Tensor]:
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        found: Callable[[Tensor, Tensor], Tensor] = getattr(import_module(module), name)
        return found


_TABLE = (
    Metric(
        name="identified", title="Identified", direction="higher", style=PERCENT, in_summary="identified",
        meaning="The share of private images that could be picked out of a line-up of similar images because the "
        "reconstruction was closest to the right one. It comes with a 95% interval, which is wide when few images were "
        "attacked. Compare it with the prior-only row: the same search without the update, which is what chance looks "
        "like.",
    ),
    Metric(
        name="ranked_first", title="Ranked first", direction="higher", style=PERCENT,
        meaning="Of attacks that hold a list of candidates: the share of private images that they ranked first on it, "
        "or among the first B in a batch of B. Such an attack draws nothing, and its picture is the candidate that it "
        "chose.",
    ),
    Metric(
        name="psnr", title="PSNR", unit="dB", direction="higher", style=".1f", in_summary="PSNR dB",
        function="gradveil.metrics.pixel:psnr", failed=0.0,
        meaning="Peak signal-to-noise ratio: how close the pixels are. Above about 20 dB a small image is usually "
        "recognizable, but a blurred or blank one can score well too, so it is never the verdict.",
    ),
    Metric(
        name="ssim", title="SSIM", direction="higher", in_summary="SSIM",
        function="gradveil.metrics.pixel:ssim", failed=-1.0,
        meaning="Structural similarity, at most 1: whether edges and textures agree.",
    ),
    Metric(
        name="lpips", title="LPIPS", direction="lower", in_summary="LPIPS", failed=1.0,
        meaning="Perceptual distance, 0 for the same image: how different the two look to a network trained on "
        "photographs.",
    ),
    Metric(
        name="mse", title="MSE", direction="lower", style=".2g", function="gradveil.metrics.pixel:mse", failed=1.0,
        meaning="Mean squared error of the pixels, which are between 0 and 1.",
    ),
    Metric(
        name="mse_r", title="MSE-R", direction="lower", style=".2g",
        meaning="Mean squared error between the model's own representations of the two images: whether they mean the "
        "same to it. Its scale depends on the model.",
    ),
    Metric(
        name="label_accuracy", title="Label accuracy", direction="higher", style=PERCENT, in_summary="labels",
        meaning="The share of labels that the attack inferred correctly. A label can be private even where the image "
        "is safe.",
    ),
    Metric(name="rank", title="Rank", direction="lower", style="d"),
    Metric(name="label_correct", title="Label recovered with its image", direction="higher"),
)  # fmt: skip
METRICS = {metric.name: metric for metric in _TABLE}


def register_metric(
    name: str, *, title: str, direction: Literal["higher", "lower"], meaning: str, failed: float, **more: str
) -> Callable[[Measure], Measure]:
    """Add a metric from outside: a function of reconstructions and private images, each [n, C, H, W] in [0, 1].

    It gives one number per pair, [n]. Audits that are scored from then on have the metric in every row, under its name.

    Args:
        name: in ``audit.json``, and after ``gradveil score --metric``.
        title: of its column.
        direction: where more is revealed.
        meaning: for the reader of a report.
        failed: what a guess that is no picture scores.
        more: other fields of :class:`Metric`: unit, style, in_summary.
    """

    def keep(function: Measure) -> Measure:
        if not name.isidentifier() or name in METRICS or name in _fields_of(ImageMetrics):
            raise ValueError(f"metric {name!r} is no name, or the name of something else in a row")
        METRICS[name] = Metric(
            name=name,
            title=title,
            direction=direction,
            meaning=meaning,
            failed=failed,
            function=function,
            **more,
        )
        return function

    return keep


def _fields_of(model: type[BaseModel]) -> set[str]:
    """Of a model and all that are made of it."""
    return set(model.model_fields).union(*map(_fields_of, model.__subclasses__()))


def finite(value: object) -> float | None:
    """A number from a file; None where it is null, NaN or infinite: all of these mean that there is no value."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError("should be a number or null")
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:  # JSON has whole numbers of any size
        return None


Number = Annotated[float | None, BeforeValidator(finite)]


class ImageMetrics(BaseModel):
    """What is measured of one image and, as a mean, of all images of a row; None where it is not available.

    Metrics from outside are kept beside the fields, under their names.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Number] = Field(init=False)

    mse: Number = None
    psnr: Number = None
    ssim: Number = None
    lpips: Number = None
    mse_r: Number = None

    @model_validator(mode="before")
    @classmethod
    def _only_known_metrics(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        own = dict.fromkeys(own_metrics())
        return own | {name: value for name, value in given.items() if name in cls.model_fields or name in own}


def own_metrics() -> list[str]:
    """The names of metrics from outside."""
    built_in = {metric.name for metric in _TABLE}
    return [name for name in METRICS if name not in built_in]


def styled(value: float | None, style: str) -> str:
    """A number as it is printed.

    >>> styled(0.256, "percent"), styled(21.26, ".1f"), styled(None, ".3f"), styled(-0.04, ".1f")
    ('26%', '21.3', 'n/a', '0.0')
    """
    if value is None:
        return NOT_AVAILABLE
    text = f"{100 * value:.0f}%" if style == PERCENT else format(value, style)
    return text.removeprefix("-") if float(text.rstrip("%")) == 0 else text
