"""A published table as plain data: its words, its figures, and the case that each of its lines stands for.

A line of a table is named by one word under each heading, such as ("CIFAR-10", "IG", "Noise"). Every word brings fields
of a case, at each scale; those of a line together, over the fields of the table, are the case that measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
Kind = Literal["audit", "training", "measure"]
Fields = Mapping[str, Any]
Line = tuple[str, ...]
Measure = Callable[[dict[str, Any]], Mapping[str, Any]]
"""What is neither an audit nor a training: from fields to figures by name, and maybe a ``surface`` of them."""


@dataclass(frozen=True)
class Word:
    """What a word of a table stands for at each scale. Without fields, its lines are not run there, for the reason."""

    small: Fields | None
    paper: Fields | None
    why: str = ""
    asks: str = ""
    """For data that the user has to bring: how to name them, such as ``imagenet:path=FOLDER``."""
    instead: str = ""
    """The data that stand in for these until the user brings them."""

    def at(self, scale: Scale) -> Fields | None:
        return self.small if scale == "small" else self.paper


def same(fields: Fields | None = None, /, **named: Any) -> Word:
    """A word that stands for the same at both scales."""
    return Word({**(fields or {}), **named}, {**(fields or {}), **named})


def joined(*words: Word) -> Word:
    """The fields of several words, later ones over earlier ones."""
    small, paper = ({key: value for word in words for key, value in (word.at(scale) or {}).items()} for scale in SCALES)
    return Word(small, paper)


def defense(spec: str) -> Word:
    return same(defenses=spec)


def attack(small: str, paper: str) -> Word:
    return Word({"attacks": small}, {"attacks": paper})


def left_out(why: str, asks: str = "") -> Word:
    """A word whose lines are not run at any scale; those of data that the user can bring, until he does."""
    return Word(None, None, why, asks)


Figures = Mapping[Line, tuple[float | None, ...]]
"""What a paper has, by line and in the order of its columns; None where it has nothing."""


def by_last(names: Iterable[str], rows: Mapping[Line, Sequence[tuple[float | None, ...]]]) -> Figures:
    """Figures of lines that share all words but the last, which goes through these names."""
    return {(*line, name): row for line, each in rows.items() for name, row in zip(names, each, strict=True)}


@dataclass(frozen=True)
class Column:
    """One figure of a line: what the paper calls it, and where it is found among ours."""

    title: str
    metric: str
    over: Literal["mean", "best", "spread of images", "spread of seeds", "kept"] = "mean"
    """``best``: the highest of each batch; ``kept``: in percent of what it is without a defense, the first word under
    the last heading."""
    digits: int = 2
    in_paper: bool = True
    """Whether the paper has such a column; the others are ours alone."""


@dataclass(frozen=True)
class Table:
    """One table, or the part of one that is measured in one way."""

    title: str
    headings: tuple[str, ...]
    words: tuple[Mapping[str, Word], ...]
    """By heading, what its words stand for."""
    columns: tuple[Column, ...]
    figures: Figures
    base: Word
    kind: Kind = "audit"
    measure: Measure | None = None
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"small": 1, "paper": 1})
    """How many seeds each line is measured with, from 0 on."""
    first_of_batch: bool = False
    """Whether only the first example of each batch counts: the sensitive one."""
    skipped: Mapping[Line, str] = field(default_factory=dict)
    """By some words: why lines with all of these are not run at any scale."""


@dataclass(frozen=True)
class Reproduction:
    """One table or figure of a paper, as it can be run here."""

    name: str
    paper: str
    """The key of the paper."""
    where: str
    """Such as ``Table I``."""
    about: str
    tables: tuple[Table, ...]
    minutes: Mapping[Scale, str]
    """What it takes: small on two cores, paper on one H200."""
    differs: tuple[str, ...]
    """What differs from the paper's setting, and what is known of the reasons for other figures."""
    not_run: tuple[str, ...] = ()
    """What of the table or figure has no line here at all, and why."""


PAPERS: Mapping[str, str] = {
    "censor": "Zhang et al., *CENSOR: Defense Against Gradient Inversion via Orthogonal Subspace Bayesian Sampling* "
    "(NDSS 2025)",
    "outpost": "Wang, Hugh and Li, *More Than Enough Is Too Much: Adaptive Defenses Against Gradient Leakage in "
    "Production Federated Learning* (IEEE/ACM Transactions on Networking 2024)",
    "dcs2": "Wu, Hayat, Zhou and Harandi, *Concealing Sensitive Samples for Enhanced Privacy in Federated Learning* "
    "(2022)",
    "ggl": "Li, Zhang, Liu and Liu, *Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage* "
    "(CVPR 2022)",
}
