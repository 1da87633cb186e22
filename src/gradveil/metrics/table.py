"""What each metric is called, its unit, and which way it points: does more of it mean that more leaked?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["higher leaks more", "lower leaks more"]


@dataclass(frozen=True)
class Metric:
    """One column of a result."""

    name: str
    title: str
    unit: str
    direction: Direction

    @property
    def higher_leaks_more(self) -> bool:
        return self.direction == "higher leaks more"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("mse", "Mean squared error", "", "lower leaks more"),
        Metric("psnr", "Peak signal-to-noise ratio", "dB", "higher leaks more"),
        Metric("ssim", "Structural similarity", "", "higher leaks more"),
        Metric("lpips", "Perceptual distance (LPIPS)", "", "lower leaks more"),
        Metric("mse_r", "Mean squared error of the representation", "", "lower leaks more"),
        Metric("rank", "Rank of the private image among the candidates", "", "lower leaks more"),
        Metric("identified", "Private image picked first", "share", "higher leaks more"),
        Metric("label_correct", "Label recovered with its image", "share", "higher leaks more"),
        Metric("label_accuracy", "Labels of the batch recovered", "share", "higher leaks more"),
    )
}
