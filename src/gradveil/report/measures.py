"""The measures of an audit: how each is written, which way it points, and what it means to a reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NOT_AVAILABLE = "n/a"


@dataclass(frozen=True)
class Measure:
    """A column of the results. ``style`` is "percent" or a format; ``leaks_when`` tells where more is revealed."""

    key: str
    name: str
    style: str
    leaks_when: Literal["higher", "lower"]
    meaning: str


MEASURES = (
    Measure(
        "identified",
        "Identified",
        "percent",
        "higher",
        "The share of private images that could be picked out of a line-up of similar images because the "
        "reconstruction was closest to the right one. It comes with a 95% interval, which is wide when few images were "
        "attacked. Compare it with the prior-only row: the same search without the update, which is what chance looks "
        "like.",
    ),
    Measure(
        "ranked_first",
        "Ranked first",
        "percent",
        "higher",
        "Of attacks that hold a list of candidates: the share of private images that they ranked first on it, or among "
        "the first B in a batch of B. Such an attack draws nothing, and its picture is the candidate that it chose.",
    ),
    Measure(
        "psnr",
        "PSNR (dB)",
        ".1f",
        "higher",
        "Peak signal-to-noise ratio: how close the pixels are. Above about 20 dB a small image is usually "
        "recognizable, but a blurred or blank one can score well too, so it is never the verdict.",
    ),
    Measure("ssim", "SSIM", ".3f", "higher", "Structural similarity, at most 1: whether edges and textures agree."),
    Measure(
        "lpips",
        "LPIPS",
        ".3f",
        "lower",
        "Perceptual distance, 0 for the same image: how different the two look to a network trained on photographs.",
    ),
    Measure("mse", "MSE", ".2g", "lower", "Mean squared error of the pixels, which are between 0 and 1."),
    Measure(
        "mse_r",
        "MSE-R",
        ".2g",
        "lower",
        "Mean squared error between the model's own representations of the two images: whether they mean the same to "
        "it. Its scale depends on the model.",
    ),
    Measure(
        "label_accuracy",
        "Label accuracy",
        "percent",
        "higher",
        "The share of labels that the attack inferred correctly. A label can be private even where the image is safe.",
    ),
)

STYLES = {measure.key: measure.style for measure in MEASURES}


def styled(value: float | None, style: str) -> str:
    """A number as it is printed.

    >>> styled(0.256, "percent"), styled(21.26, ".1f"), styled(None, ".3f"), styled(-0.04, ".1f")
    ('26%', '21.3', 'n/a', '0.0')
    """
    if value is None:
        return NOT_AVAILABLE
    text = f"{100 * value:.0f}%" if style == "percent" else format(value, style)
    return text.removeprefix("-") if float(text.rstrip("%")) == 0 else text


def span(interval: tuple[float, float] | None) -> str:
    """An interval of shares.

    >>> span((0.301, 0.954))
    '30% to 95%'
    """
    if interval is None:
        return NOT_AVAILABLE
    low, high = (styled(share, "percent") for share in interval)
    return f"{low} to {high}"
