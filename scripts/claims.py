"""The page of claims: every claim of the four papers, what was found, and the rows behind it.

The claims are in docs/results/claims/PAPER.yaml, a list of

    - id: C-30                     # a letter for the paper, and a number
      place: Fig. 2, Observation 1
      claim: what the paper says, in our own words, one or two sentences
      setting: the setting in which it was tested here, with what differs from the paper's
      verdict: holds               # one of VERDICTS
      found: what was found, with figures that are in the rows
      rows: [docs/results/convergence.jsonl]   # files that the figures come from: rows, a test, or code that shows it

With the verdict ``not tested``, ``because`` says why in place of ``found``, and there are no rows.

    python scripts/claims.py          # writes docs/results/claims.md
    python scripts/claims.py --check  # fails if a claim is incomplete or the page is not that of the files
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

ROOT = Path(__file__).parent.parent
FOLDER, PAGE = ROOT / "docs/results/claims", ROOT / "docs/results/claims.md"
PAPERS = {
    "censor": ("CENSOR (NDSS 2025)", "C"),
    "outpost": ("OUTPOST (ToN 2024)", "O"),
    "dcs2": ("DCS2", "D"),
    "ggl": ("GGL (CVPR 2022)", "G"),
}
UNAWARE = "holds only against an attacker who does not know the defense"
VERDICTS = {
    "holds": "what the paper says is what we found",
    UNAWARE: "an attack that takes the defense into account, or has a list of candidates, gets past it",
    "holds in part": "some of what is claimed was found, the rest was not; the finding says which",
    "does not hold": "we found otherwise, at the setting given",
    "not tested": "for the reason given",
}


class Claim(BaseModel):
    """One claim of a paper, and what came of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[CODG]-\d{2,3}$")
    place: str = Field(min_length=1)
    claim: str = Field(min_length=1)
    setting: str = ""
    verdict: str
    found: str = ""
    because: str = ""
    rows: tuple[str, ...] = ()

    @model_validator(mode="after")
    def complete(self) -> Claim:
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.id}: the verdict is one of {', '.join(VERDICTS)}, not {self.verdict!r}")
        if self.verdict == "not tested" and (not self.because or self.found or self.rows):
            raise ValueError(f"{self.id}: what was not tested has a reason, and neither a finding nor rows")
        if self.verdict != "not tested" and (not self.found or not self.rows or self.because):
            raise ValueError(f"{self.id}: a verdict needs a finding and the rows behind it")
        missing = [path for path in self.rows if not (ROOT / path.partition("::")[0]).exists()]
        if missing:
            raise ValueError(f"{self.id}: there is no {', '.join(missing)}")
        return self


def claims(paper: str) -> list[Claim]:
    """All of a paper, in the order of their numbers; none twice, none left out."""
    found = [Claim(**one) for one in yaml.safe_load((FOLDER / f"{paper}.yaml").read_text())]
    letter = PAPERS[paper][1]
    expected = [f"{letter}-{number:02d}" for number in range(1, len(found) + 1)]
    wrong = [one.id for one, own in zip(found, expected, strict=True) if one.id != own]
    if wrong:
        raise ValueError(f"{paper}: {wrong[0]} is twice there, or one before it is missing")
    return found


def page() -> str:
    every = {paper: claims(paper) for paper in PAPERS if (FOLDER / f"{paper}.yaml").exists()}
    lines = [
        "# What the papers claim, and what we found",
        "",
        "Every claim of the four papers that Gradveil builds on, one a row. A verdict is on the setting in its row,",
        "not on the paper as a whole. Rows are the files that the figures come from.",
        "",
        *(f"- *{name}*: {meaning}." for name, meaning in VERDICTS.items()),
        "",
        f"| paper | claims | {' | '.join(VERDICTS)} |",
        f"| --- | --- |{' --- |' * len(VERDICTS)}",
    ]
    for paper, found in every.items():
        count = Counter(one.verdict for one in found)
        lines.append(f"| {PAPERS[paper][0]} | {len(found)} | {' | '.join(str(count[name]) for name in VERDICTS)} |")
    for paper, found in every.items():
        lines += [
            "",
            f"## {PAPERS[paper][0]}",
            "",
            "| id | place | claim | tested at | verdict | what we found | rows |",
        ]
        lines.append("| --- | --- | --- | --- | --- | --- | --- |")
        for one in found:
            links = ", ".join(f"[{Path(path).name}](../../{path.partition('::')[0]})" for path in one.rows)
            words = (one.id, one.place, one.claim, one.setting, one.verdict, one.found or one.because, links)
            lines.append("| " + " | ".join(" ".join(word.split()).replace("|", "\\|") for word in words) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit("docs/results/claims.md is not what its files say: run python scripts/claims.py")


if __name__ == "__main__":
    main()
