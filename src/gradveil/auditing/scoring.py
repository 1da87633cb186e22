"""Where truth meets reconstruction: the one place that holds both, after the attack has ended."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks import Reconstruction
from gradveil.auditing.audit import ImageScore, Judgement, Membership, Ranking
from gradveil.auditing.sources import Private
from gradveil.core.errors import BadFileError, GradveilError, NotAvailableError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.types import Batch
from gradveil.data import ImageSet
from gradveil.domains import Domain
from gradveil.metrics import LPIPS, interval, label_accuracy, label_chance, luck, matching_order, picks, ranks, score
from gradveil.metrics.statistics import advantage, alarms, surprise
from gradveil.metrics.table import ImageMetrics, own_metrics
from gradveil.models import representation

MEANS = (*ImageMetrics.model_fields, "identified")
"""What a row has the means of its images of."""


class Judge:
    """Scores reconstructions; loads LPIPS once, or remembers why it is not to be had.

    ``gallery`` [m, ...] is that of the private examples or, where those of several rows differ, of the first.
    """

    def __init__(self, gallery: Tensor, domain: Domain, *, progress: Progress = SILENT) -> None:
        self.domain = domain
        self.not_available: dict[str, str] = {}
        self.lpips: LPIPS | None = None
        try:
            self.lpips = LPIPS("vgg", progress=progress)
            self.lpips.remember(gallery)
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

    def judge(
        self,
        private: Private,
        found: Sequence[Reconstruction],
        module: nn.Module,
        owners: Sequence[int | None] = (),
    ) -> Judgement:
        """Compare with the truth; the representations of MSE-R are those of ``module``.

        ``owners`` names the client of each private example, where they are known.
        """
        truth, sizes = private.batch, [len(one.inputs) for one in found]
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
            gallery=private.gallery,
            truth_index=private.places,
            lpips=self.lpips,
            representation=representation(copy.deepcopy(module).cpu(), self.domain),
        )
        right = [len(truth.labels[part]) * label_accuracy(guess.labels[part], truth.labels[part]) for part in batches]
        known, chance = private.label_counts, None
        if known is not None:
            alike = {n: [truth.labels[part] for part in batches if part.stop - part.start == n] for n in set(sizes)}
            chance = sum(n * len(own) * label_chance(known, n, torch.stack(own)) for n, own in alike.items())
            chance /= len(truth)
        means, line_up = scores.means(), len(private.gallery)
        names = (*MEANS, *own_metrics())
        measured: dict[str, Any] = {name: means.get(name) for name in names}
        infinite = [name for name in names if not math.isfinite(means.get(name, 0.0))]
        columns = {name: values.tolist() for name, values in scores.per_image.items()}
        columns["identified_share"] = columns["identified"]
        columns["identified"] = [share == 1 for share in columns["identified_share"]]
        # What an update names are the pictures nearest to any of its guesses, whichever of them was matched to which.
        named = torch.stack([scores.named[part].sum(dim=0).clamp(max=1) for part in batches])
        hits = [sum(columns["identified_share"][part]) for part in batches]
        missing = self.not_available | dict.fromkeys(infinite, "it is not finite for this model")
        if chance is None:
            missing["label_chance"] = "nobody knows how frequent labels are among examples of this kind"
        if len(set(sizes)) > 1:
            missing["luck"] = "updates are of different numbers of examples"
        source = [one for one in found for _ in one.inputs]
        return Judgement(
            images=len(truth),
            updates=len(found),
            **measured,
            identified_interval=interval(hits, sizes),
            identified_by=scores.identified_by,
            gallery=line_up,
            at_random=sum(size * min(1.0, size / line_up) for size in sizes) / len(truth),
            luck=None if "luck" in missing else luck(named.numpy(), private.places.view(len(found), -1).numpy()),
            label_accuracy=sum(right) / len(truth),
            label_interval=interval(right, sizes),
            label_chance=chance,
            not_available=missing,
            per_image=tuple(
                ImageScore(
                    index=int(private.index[i]),
                    picture=int(order[i]),
                    label=int(truth.labels[i]),
                    label_guess=int(guess.labels[i]),
                    **{name: values[i] for name, values in columns.items()},
                    objective=source[i].objective,
                    stopped=source[i].stopped,
                    client=owners[i] if owners else None,
                )
                for i in range(len(guess))
            ),
        )


def unscored(found: Sequence[Reconstruction]) -> Judgement:
    """The same where there is no truth: nothing but what the attack itself knows, and the reason."""
    reason = "there is no truth beside the exchange: only the attack's own objective is known"
    pictures = [(one, int(label)) for one in found for label in one.labels]
    return Judgement(
        images=len(pictures),
        not_available=dict.fromkeys((*MEANS, "label_accuracy"), reason),
        per_image=tuple(
            ImageScore(picture=place, label_guess=label, objective=one.objective, stopped=one.stopped)
            for place, (one, label) in enumerate(pictures)
        ),
    )


def ranked(found: Sequence[Reconstruction], index: Tensor, granted: ImageSet | None) -> Ranking:
    """Where the private examples stand in the lists of attacks that rank candidates.

    In a batch of B, the first B ranks count as first. Equal scores count as if a draw told them apart. ``index`` [n]
    says where the private examples stand among the candidates that the threat model ``granted``. It is empty of attacks
    that rank none, or other candidates.
    """
    scores = [one.scores for one in found if one.scores is not None]
    if not scores or granted is None or any(one.candidates != granted.name for one in found):
        return Ranking()
    if len(scores) < len(found) or any(own.shape != (len(granted),) for own in scores):
        raise GradveilError(f"the attack did not score each of the {len(granted)} candidates for every update")
    size = len(index) // len(found)
    table = torch.stack(scores)
    own = index.view(len(found), size)
    places = torch.cat([ranks(table, column) for column in own.unbind(dim=1)]).view(size, -1).T.flatten()
    first = float(picks(table, size).gather(1, own).mean())
    return Ranking(candidates=table.shape[1], ranks=tuple(places.tolist()), ranked_first=first)


def membership(found: Sequence[Reconstruction], without: Sequence[Reconstruction], index: Tensor) -> Membership:
    """Whether private examples are more unusual in their list than anybody is in a list that holds none of them.

    ``index`` [n] says where the private examples stand in the list that ``found`` ranks; ``without`` ranks the other
    list, which is as long. An attack that relies on a list which holds the truth names somebody there too. And one that
    names a set with strangers in it alarms for those beside a member: they took no part either. Luck does without them:
    it counts draws of who is a member, and a threshold that knows the members would not be the same for all draws.
    """
    lists = [[one.scores for one in each if one.scores is not None] for each in (found, without)]
    held, lacking = surprise(*(torch.stack(each).numpy() for each in lists))
    raised, truths = alarms(held, lacking), index.view(len(found), -1).numpy()
    took_part = np.zeros(held.shape, dtype=bool)
    np.put_along_axis(took_part, truths, True, axis=1)
    beside = held[~took_part].reshape(len(held), -1)
    members, hits = (np.take_along_axis(each, truths, axis=1) for each in (held, raised * alarms(held, beside)))
    gains = [advantage(members, others) for others in (lacking, beside)]
    gain = None if None in gains else min(each for each in gains if each is not None)
    return Membership(
        found=float(hits.mean()),
        interval=interval(hits.sum(axis=1).tolist(), members.shape[1]),
        luck=luck(raised, truths),
        advantage=None if gain is None else max(0.0, gain),
        members=members.size,
        others=lacking.size,
    )
