"""Where truth meets reconstruction: the one place that holds both, after the attack has ended."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.attacks import Reconstruction, finite_or_none
from gradveil.auditing.exchange import Private
from gradveil.core.errors import BadFileError, GradveilError, NotAvailableError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.types import Batch, Domain
from gradveil.metrics import LPIPS, METRICS, Scores, label_accuracy, matching_order, score, wilson
from gradveil.models import representation

MEANS = ("mse", "psnr", "ssim", "lpips", "mse_r", "identified")


class Judge:
    """Scores reconstructions of one private set; loads LPIPS once, or remembers why it is not to be had."""

    def __init__(self, private: Private, domain: Domain, *, progress: Progress = SILENT) -> None:
        self.private = private
        self.domain = domain
        self.not_available: dict[str, str] = {}
        self.lpips: LPIPS | None = None
        try:
            self.lpips = LPIPS("vgg", progress=progress)
            self.lpips.remember(private.gallery)
        except NotAvailableError as error:
            self.not_available["lpips"] = str(error)
        except BadFileError:  # weights that somebody changed must not change who is identified
            raise
        except GradveilError as error:  # such as pictures too small for the network
            self.lpips, self.not_available["lpips"] = None, str(error)

    @property
    def identifies_by(self) -> str:
        """The metric that decides who is identified."""
        return "ssim" if self.lpips is None else "lpips"

    def about(self, private: Private) -> Judge:
        """The same judge for other private examples of the same kind."""
        other = copy.copy(self)
        other.private = private
        return other

    def row(self, found: Sequence[Reconstruction], module: nn.Module) -> dict[str, Any]:
        """The part of a row that compares with the truth."""
        truth, sizes = self.private.batch, [len(one.inputs) for one in found]
        if sum(sizes) != len(truth) or any(one.inputs.shape[1:] != truth.inputs.shape[1:] for one in found):
            raise BadFileError(
                "the reconstructions are not of the private images: there are others, or of other shapes"
            )
        drawn = Batch(torch.cat([one.inputs for one in found]), torch.cat([one.labels for one in found]))
        batches = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        order = torch.cat([part.start + matching_order(drawn.take(part), truth.take(part)) for part in batches])
        guess = drawn.take(order)
        scores = score(
            truth,
            guess,
            gallery=self.private.gallery,
            truth_index=torch.arange(len(truth)),
            lpips=self.lpips,
            representation=representation(copy.deepcopy(module).cpu(), self.domain),
        )
        right = [label_accuracy(guess.labels[part], truth.labels[part]) for part in batches]
        means, line_up = scores.means(), len(self.private.gallery)
        identified = int(scores.per_image["identified"].sum())
        shown = {name: None if (value := means.get(name)) is None else finite_or_none(value) for name in MEANS}
        infinite = {name: "it is not finite for this model" for name in means if name in shown and shown[name] is None}
        return {
            "images": len(truth),
            **shown,
            "identified_interval": list(wilson(identified, len(truth))),
            "identified_by": scores.identified_by,
            "gallery": line_up,
            "chance": sum(size * min(1.0, size / line_up) for size in sizes) / len(truth),
            "label_accuracy": sum(right) / len(right),
            "not_available": self.not_available | infinite,
            "per_image": self._per_image(scores, guess, order, found),
        }

    def _per_image(
        self, scores: Scores, guess: Batch, order: Tensor, found: Sequence[Reconstruction]
    ) -> list[dict[str, Any]]:
        source = [one for one in found for _ in one.inputs]
        columns = {name: values.tolist() for name, values in scores.per_image.items() if name in METRICS}
        return [
            {
                "index": int(self.private.index[i]),
                "picture": int(order[i]),
                "label": int(self.private.batch.labels[i]),
                "label_guess": int(guess.labels[i]),
                **{name: _plain(values[i]) for name, values in columns.items()},
                "objective": finite_or_none(source[i].objective),
                "stopped": source[i].stopped,
            }
            for i in range(len(guess))
        ]


def _plain(value: float | bool | None) -> float | bool | None:
    return finite_or_none(value) if isinstance(value, float) else value


def unscored(found: Sequence[Reconstruction], reason: str) -> dict[str, Any]:
    """The same part of a row where there is no truth: nothing but what the attack itself knows, and the reason."""
    empty = dict.fromkeys((*MEANS, "label_accuracy"))
    pictures = [(one, int(label)) for one in found for label in one.labels]
    return {
        "images": len(pictures),
        **empty,
        "identified_interval": None,
        "identified_by": None,
        "gallery": None,
        "chance": None,
        "not_available": dict.fromkeys(empty, reason),
        "per_image": [
            {
                "index": None,
                "picture": place,
                "label": None,
                "label_guess": label,
                "identified": None,
                "objective": finite_or_none(one.objective),
                "stopped": one.stopped,
            }
            for place, (one, label) in enumerate(pictures)
        ],
    }
