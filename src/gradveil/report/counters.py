"""What an attacker who knows a defense does about it, in sentences: the counter-moves of the informed attack."""

from __future__ import annotations

from collections.abc import Sequence

from gradveil.report.records import Row

NO_MOVE = "It has no counter-move here, and goes by what the update itself shows."
NOT_TRIED = "No attack that knows the defense was tried on it."
NOT_TOLD = "The adversary was not told which defense it faces."


def counter_moves(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each defense its links with what is done about each; "none" is left out, as there is nothing to counter."""
    attacks = [row for row in rows if not row.is_prior and row.defense != "none"]
    moves = {row.defense: row.counter_moves for row in attacks if row.counter_moves is not None}
    return [(defense, _sentences(defense, moves.get(defense))) for defense in dict.fromkeys(r.defense for r in attacks)]


def _sentences(defense: str, moves: dict[str, str | None] | None) -> list[tuple[str, str]]:
    if moves is None:
        return [(defense, NOT_TRIED)]
    return [(link, sentence or NO_MOVE) for link, sentence in moves.items()] or [(defense, NOT_TOLD)]
