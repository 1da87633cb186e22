"""What a saved audit holds: its rows, its verdicts, and where their pictures lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gradveil.core.errors import BadFileError
from gradveil.report.fields import Fields


@dataclass(frozen=True)
class ImageScore:
    """How well one private image was reconstructed.

    ``index`` is its position in the data set; ``picture`` is the position of its reconstruction in the file, where the
    pictures of a batch may stand in another order than the private images they were matched to.
    """

    index: int | None
    picture: int
    label: int | None
    scores: dict[str, float | None]
    identified: bool | None
    """None where there was no truth to judge by."""
    client: int | None = None
    """Who held it, in an audit of saved exchanges."""


@dataclass(frozen=True)
class Trace:
    """The attack's own objective: one line of values per update, over ``steps``. None where it had no finite value."""

    steps: tuple[float, ...]
    lines: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Row:
    """One attack against one defense, over all images."""

    defense: str
    attack: str
    prior_of: str | None
    threat: str
    assumptions: tuple[str, ...]
    scores: dict[str, float | None]
    interval: tuple[float, float] | None
    identified_by: str | None
    not_available: dict[str, str]
    per_image: tuple[ImageScore, ...]
    objective: float | None
    seconds: float | None
    flags: tuple[str, ...]
    log: dict[str, object]
    trace: Trace
    reconstruction: str
    truth: str | None
    candidates: int | None = None
    """How many candidates the attack ranked, where it ranks any."""
    counter_moves: dict[str, str | None] | None = None
    """What an attack that knows the defense did about each link of it, None where nothing; None of all others."""
    training: str | None = None
    """In an audit of saved exchanges: which training they are of, at which stage, and how good its model was then."""
    stage: str | None = None
    round_number: int | None = None
    model_accuracy: float | None = None

    @property
    def is_prior(self) -> bool:
        """Whether this is the search without the update, which is what chance looks like."""
        return self.attack == "prior-only"


@dataclass(frozen=True)
class Cost:
    """What a defense costs in training: shares of accuracy and of time, beside a training without one."""

    grade: str
    accuracy: float | None
    accuracy_lost: float | None
    time_added: float | None
    sentence: str


@dataclass(frozen=True)
class Meaning:
    """What a flag says: when it is raised, and why that matters."""

    raised_if: str
    because: str


@dataclass(frozen=True)
class Rebuilt:
    """The worst case of one defense over the attacks that hold no candidates, beside chance."""

    attack: str
    identified: float | None
    interval: tuple[float, float] | None
    chance: float | None


@dataclass(frozen=True)
class Verdict:
    """The worst case of one defense over all attacks."""

    defense: str
    attack: str | None
    threat: str | None
    identified: float | None
    interval: tuple[float, float] | None
    chance: float | None
    """What the same search finds without the update, but at least what picking at random does."""
    images: int | None
    sentence: str
    gallery: int | None = None
    """How many images the line-up had in which an image was identified."""
    grade: str | None = None
    flags: tuple[str, ...] = ()
    cost: Cost | None = None
    candidates: int | None = None
    ranked_first: float | None = None
    """Of attacks that rank candidates: the share of private images that came first."""
    rebuilt: Rebuilt | None = None
    """Only where the worst attack chooses among candidates, and some other does not."""


@dataclass(frozen=True)
class Audit:
    """A saved audit. ``case`` and ``environment`` are kept as they were written."""

    folder: Path
    complete: bool
    case: Fields
    environment: Fields
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    trainings: tuple[Fields, ...] = ()
    """Where saved exchanges come from; empty where exchanges were made for the audit."""
    flags: dict[str, Meaning] = field(default_factory=dict)
    """What the flags of the rows mean, by name."""
    grades: dict[str, dict[str, float]] = field(default_factory=dict)
    """Up to where each grade goes, for privacy and for utility."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Defenses of the case that were not audited, each with the reason."""

    def path(self, name: str) -> Path:
        """A file of this audit. A name that leads out of the folder is refused: the JSON may come from a stranger."""
        try:
            path = (self.folder / name).resolve()
            inside = path.is_relative_to(self.folder.resolve())
        except (ValueError, OSError, RuntimeError):  # characters that no file name has, a loop of links
            inside = False
        if not inside:
            raise BadFileError(f"{self.folder / 'audit.json'} names {name!r}, which is no file in the audit folder")
        return path
