"""How much of the truth a reconstruction shows: per-image metrics, matching and identification."""

from gradveil.metrics.assignment import matched, matching_order
from gradveil.metrics.identity import ranks, wilson
from gradveil.metrics.labels import label_accuracy
from gradveil.metrics.perceptual import LPIPS
from gradveil.metrics.pixel import PSNR_CAP, mse, psnr, ssim, ssim_pairwise
from gradveil.metrics.representation import Represent, features, mse_r
from gradveil.metrics.score import FAILED, Scores, score
from gradveil.metrics.table import METRICS, Direction, Metric

__all__ = [
    "FAILED",
    "LPIPS",
    "METRICS",
    "PSNR_CAP",
    "Direction",
    "Metric",
    "Represent",
    "Scores",
    "features",
    "label_accuracy",
    "matched",
    "matching_order",
    "mse",
    "mse_r",
    "psnr",
    "ranks",
    "score",
    "ssim",
    "ssim_pairwise",
    "wilson",
]
