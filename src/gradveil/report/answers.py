"""The five answers about a defense as a page or a terminal shows them, and what to do next, from what was measured."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradveil.auditing.audit import OWN, Answer, Audit, CeilingAnswer, Verdict
from gradveil.auditing.verdict import UNTRIED
from gradveil.metrics.table import PERCENT, styled
from gradveil.report.words import in_sentence, short_attack, span

QUESTIONS = {
    "rebuilt": "picked out of the line-up by what attacks without a list rebuilt",
    "recognised": "ranked first by attacks that hold a list of candidates",
    "member": "found to have taken part, while 1% of others were taken for members",
    "labels": "read off the update",
}
NOT_ASKED = "This audit is of an older Gradveil, which did not ask."
CERTIFIED, ROUNDS = "veil", 40
"""What is proposed where nothing certified was tried, and how many rounds it plans by default."""
ELSEWHERE = "features"
"""The model that is proposed where ``veil`` cannot work on the one that was audited."""
WISHES = "--max-recognised 0.1 --max-loss 3"
SHIPPED = 100
"""Images in a set of samples."""
_STRONGER = {"quick": "standard", "standard": "thorough"}
_LOG_40 = math.log(40)
"""None found of n updates leaves up to 1 - 40^(-1/n) in the 95% interval, however many examples an update has."""


@dataclass(frozen=True)
class ShownAnswer:
    """One of the first four answers. Where there is no share, ``words`` say why."""

    name: str
    meaning: str
    share: float | None
    interval: tuple[float, float] | None
    chance: float | None
    ceiling: float | None
    outcome: str
    """``leaks`` above chance, ``holds`` where the verdict does, else ``unknown``."""
    words: str

    def brief(self) -> str:
        """In the cell of a table."""
        if self.share is None:
            return "not measured"
        ends = "" if self.interval is None else " ({:.0f} to {:.0f})".format(*(100 * end for end in self.interval))
        return styled(self.share, PERCENT) + ends


def answers(verdict: Verdict, *, people: bool = False) -> list[ShownAnswer]:
    """The first four answers; labels come first where they are people."""
    found = {name: _answer(verdict, name) for name in QUESTIONS}
    ceiling = verdict.ceiling or CeilingAnswer()
    above = {"recognised": ceiling.recognised, "member": ceiling.member}
    names = sorted(found, key=lambda name: name != "labels") if people else list(found)
    shown = []
    for name in names:
        answer, outcome = found[name], "unknown"
        if answer.above_chance:
            outcome = "leaks"
        elif answer.above_chance is False and verdict.outcome == "holds":
            outcome = "holds"
        meaning = QUESTIONS[name] + (": who somebody is" if people and name == "labels" else "")
        told = _told(answer, above.get(name))
        shown.append(
            ShownAnswer(
                name, meaning, answer.share, answer.interval, answer.chance, above.get(name), outcome, told
            )
        )  # fmt: skip
    return shown


def _answer(verdict: Verdict, name: str) -> Answer:
    """The answer as it was saved. Older audits have one of two: what the verdict itself is about."""
    answer: Answer | None = getattr(verdict, name)
    if answer is not None:
        return answer
    if name == ("rebuilt" if verdict.ranked_first is None else "recognised") and verdict.identified is not None:
        return Answer(
            attack=verdict.attack,
            share=verdict.identified,
            interval=verdict.identified_interval,
            chance=verdict.chance,
            above_chance=verdict.above_chance,
        )
    return Answer(why=NOT_ASKED)


def _told(answer: Answer, ceiling: float | None) -> str:
    if answer.share is None:
        return whole(answer.why) or NOT_ASKED
    beside = {True: "above chance", False: "not above chance", None: "chance not known"}[answer.above_chance]
    chance = "" if answer.chance is None else f" ({styled(answer.chance, PERCENT)})"
    parts = [f"{beside}{chance}"]
    parts += [] if answer.interval is None else [f"95% interval {span(answer.interval)}"]
    lucky = "" if ceiling is None or ceiling >= answer.share else " on average, so that more was luck"
    parts += [] if ceiling is None else [f"no attack passes {styled(ceiling, PERCENT)}{lucky}"]
    parts += [] if answer.attack is None else [f"by {short_attack(answer.attack)}"]
    return "; ".join(parts)


def whole(text: str) -> str:
    """A reason as a sentence of its own.

    >>> whole("nothing is noised"), whole("")
    ('Nothing is noised.', '')
    """
    return text and f"{text[0].upper()}{text[1:].removesuffix('.')}."


def ceiling(verdict: Verdict) -> str:
    """The fifth answer in a sentence, or why there is none."""
    found = verdict.ceiling
    if found is None:
        return NOT_ASKED
    figures = []
    if found.recognised is not None:
        figures.append(f"recognises more than {styled(found.recognised, PERCENT)} of a line-up of this size")
    if found.member is not None:
        figures.append(f"finds more than {styled(found.member, PERCENT)} of members at 1% false alarms")
    if found.psnr is not None:
        figures.append(f"rebuilds better than {found.psnr:.1f} dB without a prior")
    if not figures:
        return whole(found.why) or NOT_ASKED
    replies = "" if found.replies in (None, 1) else f" from {found.replies} replies"
    return f"Proven: no attack{replies} {', or '.join(figures)}. {whole(found.assumes)}".strip()


@dataclass(frozen=True)
class Advice:
    """What to do next: why, in a sentence or two, and what to type for it; empty where there is nothing to type."""

    why: str
    command: str = ""


def recommendations(audit: Audit) -> list[Advice]:
    """What to do next, most urgent first. Nothing is promised: each step ends in something to measure."""
    tried = [one for one in audit.verdicts if one.defense != "none"]
    certified = [one for one in audit.verdicts if one.ceiling is not None and one.ceiling.recognised is not None]
    found: list[Advice] = []

    def add(verdicts: Sequence[Verdict], why: str, command: str = "") -> None:
        if verdicts:
            found.append(Advice(f"With {_listed(verdicts)}, {why}", command))

    leaking = [one for one in audit.verdicts if one.above_chance]
    named = [*(one.defense for one in tried), *audit.left_out]
    if leaking and not any(_held(one) or one in certified for one in tried) and not any(CERTIFIED in n for n in named):
        what = "private examples were found more often than chance, and nothing tried has a proven ceiling"
        letter, *given = str(audit.case.get("threat", "")).split("+")
        told = letter == "E" or bool({"labels", "statistics"} & set(given))
        without = " No ceiling covers labels or statistics that are given, so none are given here." if told else ""
        changes: dict[str, object] = {"defenses": ["none", _planned(audit)], **({"threat": "D"} if told else {})}
        if audit.veil_unfit:
            changes["model"] = ELSEWHERE
            without += f" {whole(audit.veil_unfit)} It works on the same data with public features."
        add(leaking, f"{what}. Try {CERTIFIED}, which has one, and measure it.{without}", _again(audit, **changes))
    else:
        # What held against another adversary is no way out.
        better = [one for one in tried if _held(one) and all(one.threat == other.threat for other in leaking)]
        instead = f" Of what was tried, {_listed(better)} held." if better else ""
        add([one for one in leaking if one in tried], f"private examples were found more often than chance.{instead}")
    add([one for one in audit.verdicts if _leaks(one.member)],
        "members were told from others more often than chance: who took part is not hidden.")  # fmt: skip
    people = " Labels are people here: this alone tells who took part." if audit.labels_are_people else ""
    hidden = [one for one in tried if one.labels is not None and one.labels.above_chance is False]
    elsewhere = f" Not so under {_listed(hidden)}." if hidden else " No defense tried here is known to hide them."
    add(
        [one for one in audit.verdicts if _leaks(one.labels)],
        f"labels were read more often than chance.{people}{elsewhere if tried else ''}",
    )
    bare = [one for one in audit.verdicts if "no candidates" in one.flags]
    add(bare, "no attack held a list of candidates, so nobody knows who would be recognised. Give the adversary one.",
        _again(audit, threat="D"))  # fmt: skip
    add([one for one in tried if "no counter-move" in one.flags],
        "no attack written for this defense was tried and nothing proven earns a good grade, so it cannot be A or B. "
        "Write a counter-move (docs/defenses/README.md), or choose a defense that has one.")  # fmt: skip
    weak = [one for one in tried if "prior-only as good" in one.flags and not one.above_chance and one not in certified]
    stronger = _STRONGER.get(str(audit.case.get("budget")))
    if stronger and weak:
        add(weak, f"the attacks found no more than chance. Try harder before you rely on that: budget “{stronger}”.",
            _again(audit, budget=stronger))  # fmt: skip
    needed = images_for_an_a(audit)
    few = [one for one in tried if one.above_chance is False and one.grade not in (None, "A") and one not in bare]
    few = [one for one in few if needed is not None and one.images is not None and one.images < needed]
    few = [one for one in few if one.grade != UNTRIED or "no counter-move" not in one.flags]  # more would not help
    more: dict[str, object] = {"images": needed}
    data = str(audit.case.get("data"))
    if needed is not None and needed > SHIPPED and data.endswith("-samples"):
        more["data"] = f"{data.removesuffix('-samples')}:split=test"
    add(few, f"the grade is limited by the number of images. It takes {needed}, with none found, to rule out a worse "
        "one.", _again(audit, **more))  # fmt: skip
    unpriced = [one for one in certified or tried if one.cost is None and one.outcome != "leaks" and one in tried]
    search = _advise(audit, [one.defense for one in unpriced if one not in certified])
    how = "This trains with it and without, and looks for what costs least:" if search else "Train with it and without."
    add(unpriced, f"what this costs in accuracy was not measured. {how}", search)
    return found or [
        Advice("Nothing stands out. A verdict is of what was tried: repeat it when attacks or data change.")
    ]


def outcomes(audit: Audit) -> list[str]:
    """What leaks and what holds, a line for each, as the last lines of an audit."""
    lines = []
    for name, outcome in (("Leaks", "leaks"), ("Holds", "holds"), ("Not known", "unknown")):
        found = [one for one in audit.verdicts if one.outcome == outcome]
        said = [in_sentence(one.defense) + _proven(one) * (outcome == "holds") for one in found]
        lines += [f"{name}: {', '.join(said)}."] if said else []
    return lines


def _proven(verdict: Verdict) -> str:
    """What is certified, at its largest line-up of at most 100; else what no attack passes here."""
    if verdict.certificate is not None and "100" in verdict.certificate.recognised:
        most, steps = verdict.certificate.recognised["100"], verdict.certificate.steps
        return f" (nobody recognises more than {most:.1%} in a line-up of 100, over {steps} steps)"
    most_here = None if verdict.ceiling is None else verdict.ceiling.recognised
    return "" if most_here is None else f" (no attack on these replies recognises more than {most_here:.1%})"


def images_for_an_a(audit: Audit) -> int | None:
    """How many images have to be tried, none of them found, for the best grade; None where no rule was saved."""
    bound, size = audit.grades.get("privacy", {}).get("A"), audit.case.get("batch_size")
    chances = [one.at_random for one in audit.verdicts if one.at_random is not None]
    if bound is None or not chances or not 0 <= bound < 1 or max(chances) >= 1:
        return None
    most = bound + (1 - bound) * max(chances)
    each = size if isinstance(size, int) and 0 < size < 2**20 else 1
    return each * math.ceil(_LOG_40 / -math.log1p(-most)) if most > 0 else None


def _held(verdict: Verdict) -> bool:
    return verdict.outcome == "holds"


def _leaks(answer: Answer | None) -> bool:
    return answer is not None and answer.above_chance is True


def _listed(verdicts: Sequence[Verdict]) -> str:
    names = [in_sentence(one.defense) for one in verdicts]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _planned(audit: Audit) -> str:
    """What is proposed, with a plan for as many local epochs as the clients of this audit take."""
    how = audit.case.get("recipe")
    epochs = how.get("epochs") if isinstance(how, dict) and how.get("sends") == "delta" else 1
    return f"{CERTIFIED}:rounds={ROUNDS * epochs}" if isinstance(epochs, int) and 1 < epochs < 10**6 else CERTIFIED


def _advise(audit: Audit, defenses: Sequence[str]) -> str:
    """The command that looks for what costs least; empty where only a program, or saved files, hold the data."""
    case = audit.case
    if audit.trainings or case.get("data") in (None, OWN):
        return ""
    case = {**case, "data": str(case["data"]).removesuffix("-samples")}  # of which there are too few to train on
    named = [f"--{name} {shlex.quote(str(case[name]))}" for name in ("data", "model") if case.get(name) is not None]
    named += [f"--defense {shlex.quote(one)}" for one in defenses]
    return f"gradveil advise {' '.join(named)} {WISHES} --out advice"


def _again(audit: Audit, **changes: object) -> str:
    """The command, or the call, that measures the same with something changed; empty where exchanges fix it."""
    case = {**audit.case, **changes}
    if audit.trainings or "observations" in case:
        return f"gradveil audit --observations DIR --budget {case['budget']}" if "budget" in changes else ""
    if case.get("data") == OWN:
        said = ", ".join(f"{name}={value!r}" for name, value in changes.items() if name != "images")
        return f"gradveil.audit(model, {'more_examples' if 'images' in changes else 'batch'}{said and ', '}{said}, ...)"
    quoted: Callable[[object], str] = lambda value: shlex.quote(str(value))  # noqa: E731
    options = ("data", "model", "threat", "images", "batch_size", "budget", "seed")
    parts = [f"--{name.replace('_', '-')} {quoted(case[name])}" for name in options if case.get(name) is not None]
    specs = case.get("defenses")
    parts += [f"--defense {quoted(spec)}" for spec in specs] if isinstance(specs, list) else []
    how = case.get("recipe")
    if isinstance(how, dict) and how.get("sends") == "delta":
        names = {"epochs": "--epochs", "batch_size": "--mini-batch", "lr": "--lr"}
        parts += [f"{option} {quoted(how[name])}" for name, option in names.items() if how.get(name) is not None]
    if isinstance(how, dict) and how.get("train_mode") is True:
        parts.append("--train-mode")
    return f"gradveil audit {' '.join(parts)} --out next"
