"""The page of the leaderboard, in Markdown, from its entries alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gradveil.auditing.verdict import NO_CANDIDATES, NO_COUNTER_MOVE, privacy_grade
from gradveil.core.atomic import remove_partial, write_atomically
from gradveil.core.locks import claimed
from gradveil.data import load
from gradveil.lab.leaderboard.entries import PATIENCE, Entry, Told, Trained, Worst, read_entries
from gradveil.lab.leaderboard.settings import SETTINGS, Setting
from gradveil.metrics import wilson

PAGE = "README.md"
AS_GOOD = "prior-only as good"
"""The flag of a worst case that is no better than chance."""
_HEAD = """# Leaderboard

Every defense on the same settings, under the strongest attack that a suite has for it, by an adversary who
knows the defense and holds a list of candidates (threat model D). This page is made from the files in
`results`; no figure in it was typed in.

- **grade**: A to F by the upper end of the 95% interval of the share identified ([more](../verdict.md#grades)).
- **identified**: the share of private images that the worst attack (**by**) picks out of the candidates, and its 95%
  interval. A † marks a share that the same attack gets without the update too: chance.
- **without candidates**: the same for the worst of the attacks that hold none and have to rebuild the pictures.
- **labels**, **member**, where measured: the share of labels read off updates, and of members found while 1% of others
  are taken for members, with 95% intervals. A † marks one that is not above chance.
- **ceiling**: the share that no attack can pick out of as many candidates, where that is proven.
- **no counter-move** beside a grade: no attack written for this defense was tried, and nothing is proven of it.
- **accuracy**, **lost**, **time**, where measured: accuracy at the end of the setting's training, points of it lost
  against no defense, and the time of a round against one without a defense on the same device.

The best grade comes first, and within a grade what is chance. The order among lines with a † means nothing.

A grade is of what was tried: a stronger attack can only lower it. A better grade than without a defense may be a gap of
the attacks, not yet a defense that holds.

To enter a defense, write it into one file ([how](../defenses/README.md#your-own)) and run one command:

    gradveil leaderboard mine --load mine.py

"""
_COLUMNS = {"defense": "---", "grade": ":-:", "identified": "---:", "by": "---", "without candidates": "---:"}
_ANSWER_COLUMNS = {"labels": "---:", "member": "---:", "ceiling": "---:"}
_COST_COLUMNS = {"accuracy": "---:", "lost": "---:", "time": "---:"}


def render_leaderboard(folder: Path) -> Path:
    """Write the page of a folder of entries, and return where it is."""
    page = folder / PAGE
    with claimed(folder, patience=PATIENCE):  # from reading to writing: no entry is missing in the last page
        remove_partial(folder, PAGE, "results/*/*.json")
        write_atomically(page, leaderboard(read_entries(folder)).encode())
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
        parts.append(f"Not measured yet: {', '.join(empty)}.\n")
    return _HEAD + "\n".join(parts)


def _section(setting: Setting, entries: Sequence[Entry]) -> str:
    """Heading, what was measured and where, the table of defenses, and those that do not fit."""
    plain = next((one.trained for one in entries if one.defense == "none"), None)
    costs = any(one.trained is not None for one in entries)
    answered = any((one.labels, one.member, one.ceiling) != (None, None, None) for one in entries)
    columns = _COLUMNS | (_ANSWER_COLUMNS if answered else {}) | (_COST_COLUMNS if costs else {})
    lines = [list(columns), list(columns.values())]
    for one in sorted((one for one in entries if one.unfit is None), key=_order):
        worst = "" if one.worst is None else f"`{one.worst.attack.partition(':')[0]}`"
        mark = " †" if AS_GOOD in one.flags else ""
        untried = [flag for flag in (NO_COUNTER_MOVE, NO_CANDIDATES) if flag in one.flags and one.defense != "none"]
        grade = ", ".join([*([one.grade] if one.grade else []), *untried])
        cells = [f"`{one.defense}`", grade, _share(one.worst) + mark, worst, _share(one.rebuilt)]
        ceiling = "none" if one.ceiling is None else f"{one.ceiling:.0%}"
        cells += [_told(one.labels), _told(one.member), ceiling] if answered else []
        lines.append(cells + (_cost(one.trained, plain) if costs else []))
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    machines = sorted({f"{one.environment.device}, torch {one.environment.torch}" for one in entries})
    ran = f"`{setting.name}`; suite `{setting.audit['budget']}`; {'; '.join(machines)}."
    if any(one.worst and one.worst.updates for one in entries):
        ran += " Intervals count updates: the images behind one stand or fall together."
    text = f"## {setting.title}\n\n{_task(entries[0])}\n\n{ran} {_training(setting, measured=costs)}\n\n{table}"
    reasons = [f"- `{one.defense}`: {_escaped(one.unfit)}\n" for one in entries if one.unfit is not None]
    return f"{text}\nCannot work on this model:\n\n{''.join(reasons)}" if reasons else text


def _order(entry: Entry) -> tuple[object, ...]:
    """Best grade first, in it what is no better than chance, then by what was identified."""
    share = 2.0 if entry.worst is None else entry.worst.identified
    high = 2.0 if entry.worst is None else entry.worst.interval[1]
    rebuilt = 2.0 if entry.rebuilt is None else entry.rebuilt.identified
    return (entry.grade or "Z", AS_GOOD not in entry.flags, high, share, rebuilt, entry.defense)


def _share(worst: Worst | None) -> str:
    if worst is None:
        return ""
    low, high = (round(100 * end) for end in worst.interval)
    return f"{100 * worst.identified:.0f}% ({low} to {high})"


def _told(answer: Told | None) -> str:
    if answer is None:
        return ""
    ends = "" if answer.interval is None else " ({:.0f} to {:.0f})".format(*(100 * end for end in answer.interval))
    return f"{answer.share:.0%}{ends}{' †' if answer.above_chance is False else ''}"


def _cost(trained: Trained | None, plain: Trained | None) -> list[str]:
    if trained is None:
        return ["", "", ""]
    accuracy = f"{trained.accuracy:.1%}"
    if plain is None or plain is trained:
        return [accuracy, "", ""]
    lost = f"{100 * (plain.accuracy - trained.accuracy):.1f}"
    same = trained.device == plain.device
    return [accuracy, lost, f"{trained.round_seconds / plain.round_seconds:.1f}x" if same else ""]


def _task(entry: Entry) -> str:
    """What there is to find, and how much of it chance finds: that is as good as a defense can look."""
    case = entry.case
    grade = privacy_grade(wilson(round(case.chance * case.images), case.images), case.chance)
    return (
        f"{case.images} private images, {case.batch_size} behind each update, among the {len(load(case.data))} "
        f"candidates of `{case.data}`. Random picks identify {case.chance:.0%} of them on average, which with so few "
        f"images is grade {grade}: no defense can be expected to do better here."
    )


def _training(setting: Setting, *, measured: bool) -> str:
    fields = setting.training
    if fields is None:
        return "No training: it would take too long for the slow defenses."
    if not measured:
        return "What the defenses cost in training is not measured yet."
    clients = f"{fields.get('per_round', fields['clients'])} of {fields['clients']} clients"
    return (
        f"Training: {fields['rounds']} rounds of {fields['data']} on {clients}, {fields['epochs']} local epochs in "
        f"mini-batches of {fields['batch_size']}."
    )


def _escaped(text: str) -> str:
    """Text of an entry as one line that Markdown shows as it is: entries come from strangers."""
    return re.sub(r"([\\`<\[|])", r"\\\1", " ".join(text.split()))
