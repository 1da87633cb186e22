"""The record of an audit: what ``audit.json`` holds, typed once for everybody who writes or reads it.

``gradveil schema`` prints its JSON schema. Files of version 1 are read as well (:mod:`gradveil.auditing.version1`).
Nothing here loads torch: reports are made without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gradveil.core.errors import BadFileError
from gradveil.core.fields import Json
from gradveil.core.reading import read_bytes
from gradveil.metrics.table import ImageMetrics, Number, finite

VERSION = 2
PRIOR_ONLY = "prior-only"
"""What stands for the attack in the row of a search without the update."""
OWN = "your batch"
"""What stands for the data in the case of a program's own audit."""


def _text(value: object) -> object:
    """File names may hold bytes that are no text."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_text)]
Whole = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
"""As a tensor holds it: labels and places may come from a file of somebody else."""
Size = Annotated[int, Strict(), Field(ge=0, le=2**53)]
Count = Annotated[int, Strict(), Field(ge=1, le=2**53)]
Place = Annotated[float, Strict(), Field(ge=0, le=2**53)]
"""In a list: halves where others share it."""
Flag = Annotated[bool, Strict()]
_Bounded = Annotated[float, Strict(), Field(ge=0, le=1)]
Share = Annotated[_Bounded | None, BeforeValidator(finite)]
Interval = tuple[_Bounded, _Bounded]
Awareness = Literal["none", "estimates", "informed"]
Object = dict[str, JsonValue]


class _Record(BaseModel):
    """Part of the record. Fields that this version does not know are ignored."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class ImageScore(ImageMetrics, _Record):
    """How well one private image was reconstructed."""

    index: Whole | None = None
    """Its position in the data set; None where there was no truth to judge by, as for most fields."""
    picture: Whole
    """Of its reconstruction in the file: an attack may return the pictures of a batch in another order."""
    label: Whole | None = None
    label_guess: Whole | None = None
    rank: Place | None = None
    identified: Flag | None = None
    """Whether its picture is nearer to it than to any other of the line-up."""
    identified_share: Share = None
    """The same, or 1/k where k of them are equally near: the mean of a row is of these. None in older audits."""
    label_correct: Flag | None = None
    objective: Number = None
    stopped: Text
    """Why the search ended."""
    client: Whole | None = None
    """Who held it, in an audit of saved exchanges."""


class Membership(_Record):
    """How well an attack tells whether an example took part: asked of private examples, and as often of others."""

    found: Share = None
    """The share of members that were found while one in a hundred others was taken for one."""
    interval: Interval | None = None
    luck: Share = None
    """How likely as many were found if any others of the list had been the private ones."""
    advantage: Share = None
    """The most, over all thresholds, that true alarms are more frequent than false ones."""
    members: Size = 0
    others: Size = 0


class Judgement(ImageMetrics, _Record):
    """The part of a row that compares with the truth: means over all images, and the scores of each."""

    images: Size = 0
    updates: Size | None = None
    """How many updates are behind it: the images of one stand or fall together. None in rows of older audits."""
    identified: Share = None
    identified_interval: Interval | None = None
    identified_by: str | None = None
    gallery: Count | None = None
    """How many images the line-up had."""
    at_random: Share = None
    """The share that picking at random identifies: a picture counts for any of the images behind its update."""
    luck: Share = None
    """How likely picks that know nothing identify as many; None where that cannot be computed."""
    label_accuracy: Share = None
    label_interval: Interval | None = None
    label_chance: Share = None
    """The share of labels that the best guess without the update gets right."""
    member: Membership | None = None
    not_available: dict[str, str] = {}
    """By metric, why it has no value."""
    per_image: tuple[ImageScore, ...] = ()

    @model_validator(mode="after")
    def _scored_or_not(self) -> Self:
        scored = (self.identified_interval, self.gallery, self.at_random, self.label_accuracy)
        if self.identified is not None and None in scored:
            raise ValueError("it is scored in part")
        return self


class Ranking(_Record):
    """Where the private images stand in the list of an attack that ranks candidates; empty of all others."""

    candidates: Count | None = None
    ranks: tuple[Place, ...] = ()
    ranked_first: Share = None

    @model_validator(mode="after")
    def _of_candidates(self) -> Self:
        if self.ranked_first is not None and self.candidates is None:
            raise ValueError("it ranks no candidates")
        return self


class Trace(_Record):
    """The attack's own objective: one line of values per update, over ``steps``; None where it was not finite."""

    steps: tuple[Whole, ...] = ()
    objective: tuple[tuple[Number, ...], ...] = ()


class Files(_Record):
    """Where a row's files lie, relative to the folder; saved exchanges as they were given."""

    reconstruction: str
    observation: str | None = None
    observations: tuple[Text, ...] = ()
    truth: str | None = None


class Row(Judgement, Ranking):
    """One attack on one set of exchanges, or the same search without the update."""

    digest: str = ""
    defense: str
    attack: str
    prior_of: str | None = None
    """The attack whose search this is, in the row of a search without the update."""
    needs: tuple[str, ...] | None = None
    """What the attack needs to know or to be able to do; None in rows of older audits."""
    awareness: Awareness | None = None
    """How far the attack takes the defense into account: not at all, as the update shows it, or as it knows it."""
    threat: str = ""
    adversary: str = ""
    """The threat model in words."""
    assumptions: tuple[str, ...] = ()
    objective: Number = None
    seconds: Number = None
    problem_steps: Whole = 0
    strategy: str = ""
    log: dict[str, Number] = {}
    """What the defense logged on the client, as means."""
    randomized: Flag = False
    asked: Whole = 1
    statistics_given: Flag = False
    statistics_sent: Flag = False
    counter_moves: dict[str, str | None] | None = None
    """What an attack that knows the defense did about each link of it, None where nothing; None of all others."""
    trace: Trace = Trace()
    files: Files
    training: Text | None = None
    """In an audit of saved exchanges: which training they are of, at which stage, and how good its model was then."""
    stage: Text | None = None
    round: Whole | None = None
    clients: tuple[Whole, ...] = ()
    model_accuracy: Share = None
    flags: tuple[str, ...] = ()

    @property
    def is_prior(self) -> bool:
        """Whether this is the search without the update, which is what chance looks like."""
        return self.attack == PRIOR_ONLY

    def prior_among(self, rows: Sequence[Row]) -> Row | None:
        """The row of the same search without the update."""
        return next((other for other in rows if other.prior_of == self.attack), None)


class Cost(_Record):
    """What a defense costs in training, beside a training without one."""

    grade: str
    accuracy: Number = None
    accuracy_lost: Number = None
    """As a share of all test examples; negative where the defense helped."""
    round_seconds: Number = None
    time_added: Number = None
    """As a share of an undefended round; 0.5 is half as long again."""
    sentence: str = ""


class Answer(_Record):
    """One of the questions about a defense, answered by the attack that got furthest; or why there is no answer."""

    attack: str | None = None
    share: Share = None
    """Of private examples rebuilt or recognised, of members found at 1% false alarms, of labels read."""
    interval: Interval | None = None
    chance: Share = None
    """What is reached without the update."""
    above_chance: Flag | None = None
    """Whether it is more than luck explains; None where that is not known."""
    why: str = ""
    """There is no share; empty where there is one."""
    sentence: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_older_audits(cls, data: Any) -> Any:
        """Which said what was rebuilt alone, in the words of a verdict."""
        renamed = {"identified": "share", "identified_interval": "interval"}
        return {renamed.get(key, key): value for key, value in data.items()} if isinstance(data, dict) else data


class CeilingAnswer(_Record):
    """What no attack can pass under a defense, on average over private examples; or why nobody knows."""

    recognised: Share = None
    """The share that can be picked out of a list of as many candidates as the audit's."""
    chance: Share = None
    """What naming candidates without a look at the replies reaches."""
    member: Share = None
    """The share of members that a test can find which takes 1% of others for members."""
    psnr: Number = None
    """What no reconstruction exceeds that makes no use of what private examples look like."""
    replies: Count | None = None
    """How many replies about the same example it is for."""
    assumes: str = ""
    constant: Flag = False
    """Whether the same reply was seen whatever the examples are: that earns a good grade without a counter-move."""
    why: str = ""
    """There is none; empty where there is one."""
    sentence: str = ""


class CertificateAnswer(_Record):
    """What a client's own ``certificate()`` says: all its replies together, those that are planned included."""

    defense: str
    steps: Count
    """Noisy steps on one example that are covered."""
    taken: Size
    """Those of them that the clients of the audit took."""
    recognised: dict[str, _Bounded]
    """By the length of a line-up: the largest share of examples that can be picked out of it."""
    member: _Bounded
    """The largest share of members that a test finds which takes 1% of others for members."""
    epsilon: Number
    delta: Number
    psnr: Number = None
    """What no reconstruction without a prior passes, in decibels; None where the bound says nothing."""
    against: str
    assumes: tuple[str, ...]
    text: str
    """All of it for a person to read."""


class Verdict(_Record):
    """The worst case of one defense over all attacks, and the answers to five questions about it."""

    defense: str
    attack: str | None = None
    identified: Share = None
    identified_interval: Interval | None = None
    prior_only_identified: Share = None
    chance: Share = None
    """What the same search identifies without the update, but at least what picking at random does."""
    above_chance: Flag | None = None
    """Whether more were identified than chance explains; None where chance is not known."""
    grade: str | None = None
    outcome: Literal["leaks", "holds", "unknown"] = "unknown"
    threat: str | None = None
    adversary: str = ""
    images: Size | None = None
    gallery: Count | None = None
    at_random: Share = None
    candidates: Count | None = None
    ranked_first: Share = None
    round: Whole | None = None
    rebuilt: Answer | None = None
    """By attacks without candidates. It and the next four are None in older audits, which did not ask all of them."""
    recognised: Answer | None = None
    """By attacks that choose among candidates."""
    member: Answer | None = None
    labels: Answer | None = None
    ceiling: CeilingAnswer | None = None
    ceiling_of_run: CeilingAnswer | None = None
    """The same for all replies of a training, where it is known how many those are; else None."""
    certificate: CertificateAnswer | None = None
    """None where nothing counts what is sent, and in older audits."""
    flags: tuple[str, ...] = ()
    sentence: str = ""
    cost: Cost | None = None

    @property
    def rebuilt_apart(self) -> Answer | None:
        """What was rebuilt without candidates, where the worst attack of all is another one."""
        found = self.rebuilt
        return None if found is None or found.share is None or found.attack == self.attack else found


class Meaning(_Record):
    """What a flag says: when it is raised, and why that matters."""

    raised_if: str
    because: str


class SavedTraining(_Record):
    """Where saved exchanges come from: what those of one folder have in common."""

    name: Text | None = None
    folder: Text | None = None
    data: str | None = None
    model: str | None = None
    defense: str | None = None
    threat: str | None = None
    recipe: Object | None = None
    batch_size: Whole | None = None
    rounds: tuple[Whole, ...] = ()
    clients: tuple[Whole, ...] = ()


class Provenance(_Record):
    """Where an audit comes from, for somebody who has nothing but its file. No number depends on it."""

    started: Text
    """When it was begun, in UTC as 2026-11-18T08:30:00Z."""
    version: Text
    """Of Gradveil, and the commit of its source, as it was when the last rows were made."""
    commit: Text | None = None
    """None where Gradveil does not run from a git checkout; it ends in "-dirty" where the checkout was changed."""
    commands: tuple[Text, ...] = ()
    """What was typed, or the call in Python, in order: an audit may be gone on with. The home folder stands as ~."""
    data: Text | None = None
    """SHA-256 of the private examples and labels, and below of the line-up; None where nobody knows the truth."""
    line_up: Text | None = None


class Audit(_Record):
    """An audit. ``case`` and ``environment`` are kept as they were written."""

    version: Literal[2] = 2
    complete: Flag = True
    """False while rows are missing."""
    case: Object = {}
    environment: Object = {}
    provenance: Provenance | None = None
    """None in older audits."""
    class_names: dict[int, Text] = {}
    """By label that stands in a row, what it is called where that is more than its number."""
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...] = ()
    trainings: tuple[SavedTraining, ...] = ()
    """Empty where exchanges were made for the audit."""
    labels_are_people: Flag = False
    """Whether a label says who somebody is, as for faces: what labels give away is then the headline."""
    flags: dict[str, Meaning] = {}
    """By name, what the flags of the rows mean."""
    grades: dict[str, dict[str, float]] = {}
    """Up to where each grade goes, for privacy and for utility."""
    left_out: dict[str, str] = {}
    """Defenses of the case that were not audited, each with the reason."""
    veil_unfit: Text | None = None
    """Why ``veil`` cannot work on the model; empty where it can, None where nobody asked."""

    @model_validator(mode="wrap")
    @classmethod
    def _of_any_version(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict) or data.get("version", VERSION) == VERSION:
            return validate(data)
        if data["version"] != 1:
            words = "is of version {version}, this gradveil reads version 1 and 2: use the gradveil that wrote it"
            raise PydanticCustomError("version", words, {"version": repr(data["version"])[:40]})
        from gradveil.auditing import version1  # which needs these classes

        audit = validate(version1.upgraded(data))
        return audit.model_copy(update={"verdicts": tuple(map(version1.judged, audit.verdicts))})

    def as_json(self) -> Json:
        return self.model_dump(mode="json")


_Model = TypeVar("_Model", bound=BaseModel)
_KINDS = {
    "string_type": "a text", "string_unicode": "a text", "bool_type": "true or false",
    "int_type": "a whole number", "tuple_type": "a list", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object",
}  # fmt: skip
_NOT_TEXTS = {"rows": "a list", "files": "an object", "picture": "a whole number"}
"""Of fields that have to be there, those that are no texts."""
_ONE_OF = {"rows": "row", "verdicts": "verdict", "trainings": "training", "per_image": "image"}


def read_audit(folder: Path) -> Audit:
    """The audit that is saved in a folder, which may come from a stranger."""
    if not folder.is_dir():
        raise BadFileError(f"{folder} is not a folder; give the folder that an audit was saved in")
    return read_model(folder / "audit.json", Audit, "an audit")


def read_model(path: Path, kind: type[_Model], what: str) -> _Model:
    """A file of JSON, which should hold ``what``. Its size is checked before it is read, and then every field.

    Raises:
        BadFileError: one line that names the field, if the file is not as this Gradveil writes it.
    """
    try:
        return kind.model_validate_json(read_bytes(path))
    except FileNotFoundError:
        raise BadFileError(f"there is no {path}; give the folder that {what} was saved in") from None
    except OSError as error:
        raise BadFileError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        raise BadFileError(f"{path}{complaint(error)}") from None


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong with a file, and where: what stands after its name in a sentence."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind, message = first["type"], first["msg"].removeprefix("Input ")
    if kind == "json_invalid":
        deep = " or nested too deeply" if "recursion" in message else ""
        return f" is not valid JSON{deep}; the file is damaged or was cut short"
    if kind == "version":
        return f" {message}"
    if kind == "value_error":
        message = str(first["ctx"]["error"])
    elif kind == "missing":
        message = f"should be {_NOT_TEXTS.get(str(first['loc'][-1]), 'a text')}"
    elif kind in _KINDS:
        message = f"should be {_KINDS[kind]}"
    place, field = "", ""
    for part in first["loc"]:
        if isinstance(part, int):
            place, field = f"{place}, {_ONE_OF.get(field, field)} {part + 1}", ""
        else:
            field = f"{field}.{part}" if field else part
    about = f": {field[:100]!r}" if field else "" if kind in _KINDS else ":"
    return f"{place}{about} {message}; the file is damaged"
