"""The page of the leaderboard, in Markdown, and the picture at its top, from the entries alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median, stdev

from gradveil.auditing.audit import Answer, Verdict
from gradveil.auditing.verdict import NO_CANDIDATES, NO_COUNTER_MOVE
from gradveil.core.atomic import remove_partial, write_atomically
from gradveil.core.locks import claimed
from gradveil.lab.leaderboard.entries import ENDING, ENTRIES, PATIENCE, Audited, Entry, read_entries
from gradveil.lab.leaderboard.picture import Panel, Point, frontier
from gradveil.lab.leaderboard.settings import SEEDS, SETTINGS, Setting

PAGE, PICTURE = "README.md", "frontier.svg"
ANSWERS = ("rebuilt", "recognised", "member", "labels")
"""The measured answers of a verdict; the fifth is the ceiling."""
CERTIFIED = "veil"
_HEAD = """# Leaderboard

![Accuracy against the worst that was found out, for each defense in settings with a training](frontier.svg)

Every defense on the same settings, against an adversary who knows the defense and holds a list of candidates (threat
model D). Up and to the left is better. This page and its picture are computed from the files in `entries`, which hold
every training by round and every audit by example; no figure was typed in.

## How to read it

- **worst**: the worst of the four measured answers, as the share beyond chance. Lines are in this order, and by
  accuracy where it is the same.
- **grade**: A to F by the share recognised or rebuilt, at the upper end of its 95% interval and beyond chance
  ([more](../verdict.md#grades)); of the model's two states, the worse.
- **rebuilt**, **recognised**: the share of private examples that the worst attack picks out of the line-up without and
  with a list of candidates. **member**: the share of members that are found while 1% of others are taken for members.
  **labels**: the share of labels that are read off updates. Two figures are of the untrained and of the trained model.
  A † marks what is not above chance.
- **ceiling**: the share that no attack can recognise, from one reply and from all replies of the training, where that
  is proven.
- **accuracy**: the mean of three trainings after the last round ± their standard deviation; **best**: the same for the
  best round of each. Tenths are printed only where the spread is below half a point. **time**: of a round, against one
  without a defense on the same device, which other work shared.
- **Lacks**, below a table: attacks of the setting that were not run, on all lines or on those named. A grade is of what
  was tried: a stronger attack can only lower it. **no counter-move**: no attack written for this defense was tried, and
  nothing is proven of it.

## Entry rules

- One command measures a defense of yours in all settings and writes the page anew, and one an attack of yours on all
  defenses. Give a setting's name with `--setting` for less:

      gradveil leaderboard mine:size=2 --load mine.py
      gradveil leaderboard --all --attack mine --load mine.py

- A defense is one file ([how](../defenses/README.md#your-own)), an attack too ([how](../attacks/your-own.md)).
  Send the file with the entries that the command wrote.
- An entry holds the settings' own case, examples and adversary, and complete trainings with the seeds {seeds}. Others
  are refused when they are read. Nothing is tuned on the test images: options that were chosen are chosen elsewhere.
- A new attack joins the rows that an entry has; the worst row counts. Rows are never taken out because they are bad for
  a defense.
- A defense may not know which examples are audited, an attack nothing but what its threat model grants.

"""
_LEFT_OUT = """## Left out

- **SVDefense** (Luo, Yau and Song, NDSS 2026, arXiv 2510.03319): truncated singular value decomposition of gradients
  with an energy threshold that adapts to the client, weights by channel, and a weighted aggregation. What was at hand
  does not fix the thresholds and weights, and its repository held a description and no code. It is entered once its
  algorithm is certain.
- The [first edition](first-edition.md) has 16 to 20 images, untrained models and longer searches. It stays as it was,
  with its files in `results`, for other pages cite them.
"""
_COLUMNS = {
    "defense": "---", "worst": "---:", "grade": ":-:", "rebuilt": "---:", "recognised": "---:", "member": "---:",
    "labels": "---:", "ceiling": "---:",
}  # fmt: skip
_COST_COLUMNS = {"accuracy": "---:", "best": "---:", "time": "---:"}


@dataclass(frozen=True, eq=False)
class Line:
    """What the page says of one entry, computed from its rows and trainings."""

    entry: Entry

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Of the untrained and the trained model, where they were audited."""
        order = SETTINGS[self.entry.setting].stages
        audits: list[Audited] = sorted(self.entry.audits, key=lambda one: order.index(one.stage))
        return [found for found in (one.verdict() for one in audits) if found is not None]

    @property
    def grade(self) -> str | None:
        return max((one.grade for one in self.verdicts if one.grade is not None), default=None)

    @property
    def worst(self) -> float | None:
        """The largest share beyond chance among the answers; what is not above chance counts nothing."""
        found = [_beyond(getattr(one, name)) for one in self.verdicts for name in ANSWERS]
        return max((one for one in found if one is not None), default=None)

    @property
    def accuracies(self) -> list[float]:
        """After the last round, of each complete training."""
        return [one.accuracy[-1] for one in self.entry.trainings if one.complete and one.accuracy]

    @property
    def best(self) -> list[float]:
        return [max(one.accuracy) for one in self.entry.trainings if one.complete and one.accuracy]

    @property
    def round_seconds(self) -> dict[str, float]:
        """By device, the median over trainings."""
        found: dict[str, list[float]] = {}
        for one in self.entry.trainings:
            if one.round_seconds is not None:
                found.setdefault(one.device, []).append(one.round_seconds)
        return {device: median(times) for device, times in found.items()}

    def order(self) -> tuple[object, ...]:
        worst = 2.0 if self.worst is None else round(self.worst, 2)
        return (worst, -mean(self.accuracies or [0.0]), self.entry.defense)

    def dominates(self, other: Line) -> bool:
        """Whether it gives away no more and is no less accurate, and one of both for more than chance."""
        if self.worst is None or other.worst is None or not self.accuracies or not other.accuracies:
            return False
        ahead = mean(self.accuracies) - mean(other.accuracies)
        spread = max(_spread(self.accuracies), _spread(other.accuracies))
        no_worse = round(self.worst, 2) <= round(other.worst, 2) and ahead >= 0
        return no_worse and (round(self.worst, 2) < round(other.worst, 2) or ahead > 2 * spread)


def render_leaderboard(folder: Path) -> Path:
    """Write the page of a folder of entries and its picture, and return where the page is."""
    page = folder / PAGE
    with claimed(folder, patience=PATIENCE):  # from reading to writing: no entry is missing in the last page
        remove_partial(folder, PAGE, PICTURE, f"{ENTRIES}/*/*{ENDING}")
        entries = read_entries(folder)
        write_atomically(folder / PICTURE, picture(entries).encode())
        write_atomically(page, leaderboard(entries).encode())
    return page


def leaderboard(entries: Sequence[Entry]) -> str:
    """The page as text."""
    parts, empty = [], []
    for name, setting in SETTINGS.items():
        own = [one for one in entries if one.setting == name]
        if own:
            parts.append(_section(setting, own))
        else:
            empty.append(name)
    if empty:
        listed = "".join(f"- `{name}`: {SETTINGS[name].title}\n" for name in empty)
        parts.append(
            "## Not measured yet\n\nThese need some minutes of a GPU each: "
            f"`gradveil leaderboard --all --setting NAME`.\n\n{listed}"
        )
    seeds = ", ".join(map(str, SEEDS[:-1])) + f" and {SEEDS[-1]}"
    return _HEAD.replace("{seeds}", seeds) + "\n".join([*parts, _LEFT_OUT])


def picture(entries: Sequence[Entry]) -> str:
    """The frontier of each setting with a training, as SVG."""
    panels = []
    for setting in SETTINGS.values():
        lines = [Line(one) for one in entries if one.setting == setting.name]
        points = [
            Point(line.entry.defense, line.worst, mean(line.accuracies), _spread(line.accuracies))
            for line in lines
            if line.worst is not None and line.accuracies
        ]
        if setting.training is not None and points:
            panels.append(Panel(setting.title, tuple(points)))
    return frontier(panels)


def _section(setting: Setting, entries: Sequence[Entry]) -> str:
    """Heading, what was measured and where, the table of defenses, who dominates whom, and those that do not fit."""
    shown = [one for one in entries if one.trainings or any(audit.rows for audit in one.audits)]
    lines = sorted(map(Line, shown), key=Line.order)
    plain = next((line for line in lines if line.entry.defense == "none"), None)
    columns = _COLUMNS | (_COST_COLUMNS if setting.training is not None else {})
    table = [list(columns), list(columns.values())]
    for line in lines:
        cells = [f"`{line.entry.defense}`", "" if line.worst is None else f"{line.worst:.0%}", _grade(line)]
        cells += [" / ".join(_answer(one, name) for one in line.verdicts) or "?" for name in ANSWERS]
        cells += [_ceiling(line)]
        if setting.training is not None:
            cells += [_accuracy(line.accuracies), _accuracy(line.best), _time(line, plain)]
        table.append(cells)
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    text = f"## {setting.title}\n\n{setting.about} {_task(setting, entries)}\n\n{_training(setting)}\n\n{rows}"
    if missing := _lacking(lines):
        text += f"\n{missing}\n"
    if setting.training is not None:
        text += f"\n{_frontier(lines)}\n"
    slow = sorted(
        {one.defense for one in entries if any(not each.complete and not each.unfit for each in one.trainings)}
    )
    if slow:
        text += f"\nToo slow to be trained to the end: {', '.join(f'`{spec}`' for spec in slow)}.\n"
    untrained = {one.defense: each.unfit for one in entries for each in one.trainings if each.unfit}
    reasons = {one.defense: one.unfit for one in entries if one.unfit is not None} | untrained
    if reasons:
        listed = "".join(f"- `{spec}`: {_escaped(why)}\n" for spec, why in sorted(reasons.items()) if why)
        text += f"\nCannot work on this model:\n\n{listed}"
    return text


def _lacking(lines: Sequence[Line]) -> str:
    """Which attacks were not run on which lines, and of which lines one state of the model was not audited."""
    found: dict[str, list[str]] = {}
    for line in lines:
        entry = line.entry
        for what in [*(f"`{spec}`" for spec in entry.lacks()), *(f"the {stage} model" for stage in entry.unseen())]:
            found.setdefault(what, []).append(entry.defense)
    if not found:
        return ""
    every = {what: len(each) == len(lines) for what, each in found.items()}
    whom = {what: "" if every[what] else f" ({', '.join(f'`{one}`' for one in each)})" for what, each in found.items()}
    return f"Lacks: {'; '.join(f'{what}{names}' for what, names in whom.items())}."


def _frontier(lines: Sequence[Line]) -> str:
    """Whether another defense dominates the certified one."""
    own = [line for line in lines if line.entry.defense.startswith(CERTIFIED) and line.accuracies]
    if not own:
        return f"`{CERTIFIED}` was not trained here."
    others = [line for line in lines if not line.entry.defense.startswith(CERTIFIED) and line.accuracies]
    found = sorted({line.entry.defense for line in others if any(line.dominates(one) for one in own)})
    name = own[0].entry.defense
    if not found:
        return f"None of the other {len(others)} that were trained gives away as little as `{name}` and is as accurate."
    listed = ", ".join(f"`{one}`" for one in found)
    return f"At least as accurate as `{name}`, and gives away no more: {listed}."


def _beyond(answer: Answer) -> float | None:
    """The share beyond chance; 0 where it is not above chance, None where there is no answer."""
    if answer.share is None:
        return None
    chance = answer.chance or 0.0
    if answer.above_chance is False or chance >= 1:
        return 0.0
    return max(0.0, (answer.share - chance) / (1 - chance))


def _answer(verdict: Verdict, name: str) -> str:
    """One answer in a cell; intervals stand beside what the grade goes by."""
    answer: Answer = getattr(verdict, name)
    if answer.share is None:
        return "?"
    graded = answer.interval is not None and name in ("rebuilt", "recognised")
    ends = " ({:.0f} to {:.0f})".format(*(100 * end for end in answer.interval or ())) if graded else ""
    return f"{answer.share:.0%}{ends}{' †' if answer.above_chance is False else ''}"


def _grade(line: Line) -> str:
    """With what was not tried in either state of the model."""
    flags = set.intersection(*(set(one.flags) for one in line.verdicts)) if line.verdicts else set()
    untried = [flag for flag in (NO_COUNTER_MOVE, NO_CANDIDATES) if flag in flags and line.entry.defense != "none"]
    return ", ".join([*([line.grade] if line.grade else []), *untried])


def _ceiling(line: Line) -> str:
    proven = [one for one in line.verdicts if one.ceiling is not None and one.ceiling.recognised is not None]
    if not proven or len(proven) < len(line.verdicts):
        return "none"
    reply = max(one.ceiling.recognised for one in proven if one.ceiling and one.ceiling.recognised is not None)
    runs = [one.ceiling_of_run.recognised for one in proven if one.ceiling_of_run is not None]
    whole = [share for share in runs if share is not None]
    return f"{reply:.1%}" + (f", {max(whole):.1%} in all" if whole else "")


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _accuracy(values: Sequence[float]) -> str:
    """Mean and spread in percent, with as many digits as the spread carries."""
    if not values:
        return ""
    if len(values) < 2:
        return f"{values[0]:.0%} (1 seed)"
    spread = 100 * _spread(values)
    digits = 1 if spread < 0.5 else 0
    seeds = "" if len(values) == len(SEEDS) else f" ({len(values)} seeds)"
    return f"{100 * mean(values):.{digits}f} ± {spread:.{digits}f}%{seeds}"


def _time(line: Line, plain: Line | None) -> str:
    if plain is None or plain is line:
        return ""
    ratios = [
        own / plain.round_seconds[device] for device, own in line.round_seconds.items() if device in plain.round_seconds
    ]
    return f"{ratios[0]:.1f}x" if ratios else ""


def _task(setting: Setting, entries: Sequence[Entry]) -> str:
    """What there is to find, and how much of it chance finds: that is as good as a defense can look."""
    case = setting.case(["none"], "cpu")
    lineup = max(case.images, case.gallery)
    chance = min(1.0, case.batch_size / lineup)
    machines = sorted({f"{e.device}, torch {e.torch}" for one in entries for a in one.audits if (e := a.environment)})
    attacks = ", ".join(f"`{one}`" for one in case.attacks)
    return (
        f"{case.images} private examples, {case.batch_size} behind each reply, in a line-up of {lineup}; random picks "
        f"get {chance:.1%}. Attacks: {attacks}. {'; '.join([f'`{setting.name}`', *machines])}."
    )


def _training(setting: Setting) -> str:
    fields = setting.training
    if fields is None:
        return "No training: what a defense costs stands in the settings above."
    clients = f"{fields.get('per_round', fields['clients'])} of {fields['clients']} clients"
    batch = "all their examples" if fields["batch_size"] is None else f"{fields['batch_size']} examples each"
    wanted = "" if setting.reaches is None else f" Without a defense it has to reach {setting.reaches:.0%}."
    return (
        f"Training: {fields['rounds']} rounds of FedSGD on {fields['data']}, {clients} with {batch}, rate "
        f"{fields['lr']:g}, server momentum {fields['server_momentum']}; accuracy is that of the mean of models from "
        f"round {fields['average_from']} on.{wanted}"
    )


def _escaped(text: str) -> str:
    """Text of an entry as one line that Markdown shows as it is: entries come from strangers."""
    return re.sub(r"([\\`<\[|])", r"\\\1", " ".join(text.split()))
