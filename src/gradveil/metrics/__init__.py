"""How much of the truth a reconstruction shows: per-image metrics, matching and identification.

Names are loaded when first asked for, because the table of metrics serves reports, which are made without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradveil.metrics.table import METRICS, Metric, register_metric

if TYPE_CHECKING:
    from gradveil.metrics.identity import label_accuracy as label_accuracy
    from gradveil.metrics.identity import label_chance as label_chance
    from gradveil.metrics.identity import matched as matched
    from gradveil.metrics.identity import matching_order as matching_order
    from gradveil.metrics.identity import picks as picks
    from gradveil.metrics.identity import ranks as ranks
    from gradveil.metrics.identity import wilson as wilson
    from gradveil.metrics.perceptual import LPIPS as LPIPS
    from gradveil.metrics.pixel import PSNR_CAP as PSNR_CAP
    from gradveil.metrics.pixel import mse as mse
    from gradveil.metrics.pixel import psnr as psnr
    from gradveil.metrics.pixel import ssim as ssim
    from gradveil.metrics.pixel import ssim_pairwise as ssim_pairwise
    from gradveil.metrics.scores import FAILED as FAILED
    from gradveil.metrics.scores import Represent as Represent
    from gradveil.metrics.scores import Scores as Scores
    from gradveil.metrics.scores import features as features
    from gradveil.metrics.scores import score as score
    from gradveil.metrics.statistics import better as better
    from gradveil.metrics.statistics import holm as holm
    from gradveil.metrics.statistics import interval as interval
    from gradveil.metrics.statistics import luck as luck

_WHERE = {
    "identity": ("label_accuracy", "label_chance", "matched", "matching_order", "picks", "ranks", "wilson"),
    "perceptual": ("LPIPS",),
    "pixel": ("PSNR_CAP", "mse", "psnr", "ssim", "ssim_pairwise"),
    "scores": ("FAILED", "Represent", "Scores", "features", "score"),
    "statistics": ("better", "holm", "interval", "luck"),
}
__all__ = ["METRICS", "Metric", "register_metric", *(name for names in _WHERE.values() for name in names)]


def __getattr__(name: str) -> Any:
    for file, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
