"""Who the adversary is: what it knows and what it may do.

The eight named models follow the table of the SoK by Carletti et al. (USENIX Security 2025). Its columns are updates,
basic knowledge, training details, surrogate data, client data distribution, active manipulation, client selection. Here
basic knowledge is the number of examples behind an update; training details are the recipe and the defense with its
parameters (a defense must not rest on secrecy); surrogate data come with the candidates among them; the distribution is
the batch-norm statistics of the private data. Private labels are in none of them: an audit that grants them says so, as
in ``C+labels``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from gradveil.core.errors import GradveilError, UnknownNameError


class Knowledge(StrEnum):
    """One thing an adversary may know or may do, beyond seeing the broadcast and the reply."""

    BATCH_SIZE = "batch-size"
    RECIPE = "recipe"
    DEFENSE = "defense"
    PUBLIC_DATA = "public-data"
    CANDIDATES = "candidates"
    STATISTICS = "statistics"
    LABELS = "labels"
    CRAFT = "craft"
    ASK_AGAIN = "ask-again"
    CHOOSE_CLIENTS = "choose-clients"


PLAIN: dict[Knowledge, str] = {
    Knowledge.BATCH_SIZE: "knows how many examples are behind an update",
    Knowledge.RECIPE: "knows how the client trains: learning rate, epochs, mini-batches, train or eval mode",
    Knowledge.DEFENSE: "knows which defense the client uses, with its parameters",
    Knowledge.PUBLIC_DATA: "holds public data of the same kind as the private data",
    Knowledge.CANDIDATES: "holds a list of candidates with the private examples among them",
    Knowledge.STATISTICS: "knows the batch-norm statistics of the private data",
    Knowledge.LABELS: "was given the private labels, which real systems do not reveal",
    Knowledge.CRAFT: "may send clients a model it has tampered with",
    Knowledge.ASK_AGAIN: "may ask the same client again in later rounds",
    Knowledge.CHOOSE_CLIENTS: "may choose which clients take part",
}


@dataclass(frozen=True)
class ThreatModel:
    """A named set of knowledge and powers."""

    name: str
    title: str
    knows: frozenset[Knowledge]

    def sentences(self) -> list[str]:
        """What the adversary sees, knows and may do, in plain language."""
        first = "The adversary sees the model that was broadcast and the update that one client sent back."
        return [first, *(f"It {PLAIN[item]}." for item in Knowledge if item in self.knows)]

    def vet(self, attack: str, needs: Iterable[Knowledge]) -> None:
        """Refuse an attack that needs more than this adversary has."""
        missing = [item for item in Knowledge if item in set(needs) - self.knows]
        if missing:
            wider = [t.name for t in THREATS.values() if set(needs) <= t.knows]
            hint = f"; it fits threat model {', '.join(wider)}" if wider else ""
            raise GradveilError(f"attack {attack!r} needs {', '.join(missing)}, which threat {self.name} lacks{hint}")


_BASIC = frozenset({Knowledge.BATCH_SIZE})
_TRAINING = _BASIC | {Knowledge.RECIPE, Knowledge.DEFENSE}
_SURROGATE = _TRAINING | {Knowledge.PUBLIC_DATA, Knowledge.CANDIDATES}
_ACTIVE = frozenset({Knowledge.CRAFT, Knowledge.ASK_AGAIN})
THREATS = {
    threat.name: threat
    for threat in (
        ThreatModel("A", "eavesdropper", frozenset()),
        ThreatModel("B", "informed eavesdropper", _BASIC),
        ThreatModel("C", "parameter-aware eavesdropper", _TRAINING),
        ThreatModel("D", "data-enhanced eavesdropper", _SURROGATE),
        ThreatModel("E", "statistics-informed eavesdropper", _SURROGATE | {Knowledge.STATISTICS}),
        ThreatModel("F", "active manipulator", _TRAINING | _ACTIVE),
        ThreatModel("G", "data-enhanced manipulator", _SURROGATE | _ACTIVE),
        ThreatModel("H", "active client manipulator", _SURROGATE | _ACTIVE | {Knowledge.CHOOSE_CLIENTS}),
    )
}


def threat_model(spec: str) -> ThreatModel:
    """A threat model by its letter, with extra knowledge after plus signs.

    >>> threat_model("C+labels").title
    'parameter-aware eavesdropper, labels'
    """
    letter, *extra = (part.strip() for part in spec.split("+"))
    base = THREATS.get(letter.upper())
    if base is None:
        raise UnknownNameError(f"no threat model is called {letter!r}; there are: {', '.join(THREATS)}")
    if not extra:
        return base
    known = {item.value: item for item in Knowledge}
    for name in extra:
        if name not in known:
            raise UnknownNameError(f"no knowledge is called {name!r}; there are: {', '.join(known)}")
    added = frozenset(known[name] for name in extra)
    name = "+".join([base.name, *(item for item in Knowledge if item in added)])
    return ThreatModel(name, f"{base.title}, {', '.join(i for i in Knowledge if i in added)}", base.knows | added)
