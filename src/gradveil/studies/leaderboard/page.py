"""The page of the leaderboard, in Markdown, from its entries alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradveil.core.atomic import write_atomically
from gradveil.studies.leaderboard.entries import Entry, Trained, Worst, read_entries
from gradveil.studies.leaderboard.settings import SETTINGS, Setting

PAGE = "README.md"
_HEAD = """# Leaderboard

Every defense on the same settings, under the strongest attack that a suite has for it, by an adversary who
knows the defense and holds a list of candidates (threat model D). This page is made from the files in
`results`; no figure in it was typed in.

- **grade**: A to F by the upper end of the 95% interval of the share identified ([more](../verdict.md)).
- **identified**: private images that the worst attack picks out of a hundred, and their 95% interval.
- **without candidates**: the same over the attacks that only rebuild pictures.
- **accuracy**, **lost**: of the model that the setting's training ends with; points lost against no defense.
- **time**: of a round of that training, against one without a defense on the same device.

To enter a defense, write it into one file ([how](../defenses/README.md#your-own)) and run one command:

    gradveil leaderboard mine --load mine.py

"""
_TABLE = """| defense | grade | identified | by | without candidates | accuracy | lost | time |
| --- | :-: | ---: | --- | ---: | ---: | ---: | ---: |
"""


def render_leaderboard(folder: Path) -> Path:
    """Write the page of a folder of entries, and return where it is."""
    page = folder / PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, leaderboard(read_entries(folder)).encode())
    return page


def leaderboard(entries: Sequence[Entry]) -> str:
    """The page as text."""
    tables = [_table(setting, [one for one in entries if one.setting == name]) for name, setting in SETTINGS.items()]
    empty = [name for name in SETTINGS if all(one.setting != name for one in entries)]
    missing = f"Not measured yet: {', '.join(empty)}.\n" if empty else ""
    return _HEAD + "\n".join([*filter(None, tables), *filter(None, [missing])])


def _table(setting: Setting, entries: Sequence[Entry]) -> str:
    if not entries:
        return ""
    plain = next((one.trained for one in entries if one.defense == "none"), None)
    lines = [_line(one, plain) for one in sorted(entries, key=_order)]
    ran = sorted({f"{one.environment['device']}, torch {one.environment['torch']}" for one in entries})
    about = f"`{setting.name}`; suite `{setting.audit['budget']}`; {'; '.join(ran)}.{_training_words(setting)}"
    return f"## {setting.title}\n\n{about}\n\n{_TABLE}{''.join(lines)}"


def _order(entry: Entry) -> tuple[object, ...]:
    """Best grade first, then by what was identified; those that do not fit last."""
    share = 2.0 if entry.worst is None else entry.worst.identified
    high = 2.0 if entry.worst is None else entry.worst.interval[1]
    rebuilt = 2.0 if entry.rebuilt is None else entry.rebuilt.identified
    return (entry.unfit is not None, entry.grade or "Z", high, share, rebuilt, entry.defense)


def _line(entry: Entry, plain: Trained | None) -> str:
    name = f"`{entry.defense}`"
    if entry.unfit is not None:
        return f"| {name} | | does not fit: {_cell(entry.unfit)} | | | | | |\n"
    worst = "" if entry.worst is None else f"`{entry.worst.attack.partition(':')[0]}`"
    cells = [name, entry.grade or "", _share(entry.worst), worst, _share(entry.rebuilt), *_cost(entry.trained, plain)]
    return f"| {' | '.join(cells)} |\n"


def _share(worst: Worst | None) -> str:
    if worst is None:
        return ""
    low, high = (round(100 * end) for end in worst.interval)
    return f"{100 * worst.identified:.0f}% ({low} to {high})"


def _cost(trained: Trained | None, plain: Trained | None) -> list[str]:
    if trained is None:
        return ["", "", ""]
    if plain is None or plain is trained:
        return [f"{trained.accuracy:.1%}", "", ""]
    same = trained.device == plain.device
    return [
        f"{trained.accuracy:.1%}",
        f"{100 * (plain.accuracy - trained.accuracy):.1f}",
        f"{trained.round_seconds / plain.round_seconds:.1f}x" if same else "",
    ]


def _training_words(setting: Setting) -> str:
    fields = setting.training
    if fields is None:
        return " No training: it would take too long for the slow defenses."
    clients = f"{fields.get('per_round', fields['clients'])} of {fields['clients']} clients"
    return (
        f" Training: {fields['rounds']} rounds of {fields['data']} on {clients}, {fields['epochs']} local epochs in "
        f"mini-batches of {fields['batch_size']}."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
