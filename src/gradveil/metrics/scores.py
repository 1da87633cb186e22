"""All metrics of reconstructions against the truth, for the one place where the two meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.metrics.identity import picks, ranks
from gradveil.metrics.perceptual import LPIPS
from gradveil.metrics.pixel import ssim_pairwise
from gradveil.metrics.table import METRICS

Represent = Callable[[Tensor], Tensor]
"""Images [n, C, H, W] to feature vectors [n, features]: "the feature vector before the final classification layer"."""
FAILED = {name: metric.failed for name, metric in METRICS.items() if metric.failed is not None}
"""What a guess that is no picture scores."""
_AT_ONCE = 64


@dataclass(frozen=True)
class Scores:
    """Metrics per image, each [n], under the names of ``METRICS``; a metric that could not be had is absent."""

    per_image: dict[str, Tensor]
    identified_by: Literal["lpips", "ssim"]
    """The distance by which candidates were ranked: LPIPS, or 1 - SSIM where LPIPS was not available."""

    named: Tensor
    """[n, m]: how likely each candidate is the one that the guess is nearest to, if a draw tells equal ones apart."""

    def means(self) -> dict[str, float]:
        return {name: float(values.double().mean()) for name, values in self.per_image.items()}


def score(
    truth: Batch,
    guess: Batch,
    *,
    gallery: Tensor,
    truth_index: Tensor,
    lpips: LPIPS | None,
    representation: Represent | None,
) -> Scores:
    """Score guesses that stand in the order of the truth (see ``matched``).

    ``gallery`` [m, C, H, W] holds the candidates among which each private image is to be picked out; ``truth_index``
    [n] says where in it each one is. ``identified`` is a share where several are equally near. Pixels outside [0, 1]
    are clipped, as any viewer would. A guess with a pixel that is not finite is no picture: it scores ``FAILED``, puts
    the private image last among the candidates, and its representation counts as zero. MSE-R is that of Li et al. (GGL,
    CVPR 2022).
    """
    if guess.inputs.shape != truth.inputs.shape:
        shapes = f"{list(guess.inputs.shape)}, the truth {list(truth.inputs.shape)}"
        raise GradveilError(f"a guess must have the shape of the truth to be scored: the guess is {shapes}")
    if len(gallery) < 2:
        raise GradveilError("identification needs at least one distractor: give more candidates than the private image")
    if not torch.equal(gallery[truth_index], truth.inputs):
        raise GradveilError("truth_index does not point at the private images in the gallery")
    is_picture = guess.inputs.isfinite().flatten(1).all(dim=1)
    images = guess.inputs.clamp(0, 1).where(is_picture[:, None, None, None], 0.0)
    per_image = {name: metric.load()(images, truth.inputs) for name, metric in METRICS.items() if metric.function}
    if lpips is None:
        distances = 1 - ssim_pairwise(images, gallery)
    else:
        distances = lpips.pairwise(images, gallery)
        per_image["lpips"] = lpips.distance(images, truth.inputs)
    for name, values in per_image.items():
        if values.shape != is_picture.shape:
            raise GradveilError(
                f"metric {name} must give one number per image, [{len(images)}], not {list(values.shape)}"
            )
        per_image[name] = values.where(is_picture, METRICS[name].failed or 0.0)
    if representation is not None:
        found = features(images, representation).where(is_picture[:, None], 0.0)
        per_image["mse_r"] = (found - features(truth.inputs, representation)).square().mean(dim=1)
    named = picks(distances) * is_picture[:, None]
    per_image["rank"] = ranks(distances, truth_index).where(is_picture, len(gallery))
    per_image["identified"] = named.gather(1, truth_index.to(named.device)[:, None])[:, 0]
    per_image["label_correct"] = guess.labels == truth.labels
    return Scores(per_image, identified_by="ssim" if lpips is None else "lpips", named=named)


@torch.no_grad()
def features(images: Tensor, represent: Represent) -> Tensor:
    """The representation of each image, [n, features], computed in chunks."""
    found = torch.cat([represent(chunk) for chunk in torch.split(images, _AT_ONCE)])
    if not torch.isfinite(found).all():
        raise GradveilError(
            "the model's representation of these images is not finite, so MSE-R has no value: leave it out"
        )
    return found
