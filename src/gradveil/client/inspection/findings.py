"""What an inspection of a broadcast found, in words and figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["alarm", "note"]
"""An alarm makes a broadcast suspicious; a note is worth knowing and has honest explanations."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that an honest server would not send, where it stands, and how far it is beyond its bound."""

    check: str
    severity: Severity = "alarm"
    where: tuple[str, ...]
    """Names of the layers or parameters."""
    sentence: str
    """What was found and why it is suspicious."""
    figure: float
    bound: float
    """What ``figure`` would have to stay below."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.check} in {_listed(self.where)}: {self.sentence}"


@dataclass(frozen=True)
class Inspection:
    """All findings about one broadcast. ``left_out`` says which checks could not be made, and what they need."""

    findings: tuple[Finding, ...]
    left_out: tuple[str, ...] = ()

    @property
    def suspicious(self) -> bool:
        return any(finding.severity == "alarm" for finding in self.findings)

    @property
    def summary(self) -> str:
        """One line, for a warning or an error."""
        alarms = [str(finding).removeprefix("alarm: ") for finding in self.findings if finding.severity == "alarm"]
        if not alarms:
            return "nothing suspicious was found in the broadcast"
        more = f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else ""
        return f"the broadcast looks crafted: {alarms[0]}{more}"

    def as_dict(self) -> dict[str, Any]:
        return {"suspicious": self.suspicious, **asdict(self)}

    def __str__(self) -> str:
        left_out = (f"not checked: {reason}" for reason in self.left_out)
        return "\n".join([*map(str, self.findings), *left_out] or [self.summary])


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
