"""Under every defense the informed attack is at least as good as the same search uninformed, or a flag says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil.auditing import Row, make_case, run_case

EASY = ["none", "sparsify", "soteria", "clip:bound=4", "noise:sigma=0.1"]
EVERY = [
    *EASY, "noise:sigma=0.01", "clip:bound=4+noise:sigma=0.01", "dp", "graddefense", "censor", "censor:norms=public",
    "outpost", "dcs2", "dcs2plus", "precode", "ats",
]  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize(
    ("defenses", "images", "iterations", "gallery", "gained"),
    [(EASY, 4, 150, 20, 4), pytest.param(EVERY, 8, 600, 100, 8, marks=pytest.mark.slow)],
)
def test_knowing_the_defense_never_hurts_unsaid(
    defenses: list[str],
    images: int,
    iterations: int,
    gallery: int,
    gained: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    attacks = [f"{name}:iterations={iterations},restarts=1" for name in ("ig", "informed")]
    case = make_case({"images": images, "defenses": defenses, "attacks": attacks, "gallery": gallery})
    rows: dict[tuple[str, str], Row] = {
        (row.attack.partition(":")[0], row.defense): row for row in run_case(case, tmp_path / "a").rows
    }
    nearer = 0
    for defense in case.defenses:
        plain, informed = (rows[attack, defense] for attack in ("ig", "informed"))
        said = "weaker attack was better" in informed.flags
        assert said == (informed.identified < plain.identified), defense
        nearer += informed.psnr > plain.psnr + 1
    assert nearer >= gained, "knowing the defense buys something"
