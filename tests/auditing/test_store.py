"""The folder of an audit: what may be added to it, and what may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradveil.auditing import make_case, run_case
from gradveil.auditing.store import Store
from gradveil.core.errors import GradveilError

FIELDS = {
    "data": "mnist-samples", "model": "mlp", "images": 2, "gallery": 10, "threat": "D", "attacks": ["analytic"],
    "defenses": ["none"],
}  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "a"
    run_case(make_case(FIELDS), folder)
    return folder


@pytest.mark.integration
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"data": "cifar10-samples"}, "its data is mnist-samples, not cifar10-samples"),
        ({"model": "mlp:hidden=8"}, "its model is mlp, not mlp:hidden=8"),
        ({"images": 4}, "its images is 2, not 4"),
        ({"every": 2}, "its every is 1, not 2"),
        ({"batch_size": 2}, "its batch_size is 1, not 2"),
        ({"threat": "C"}, "its threat is D, not C"),
        ({"gallery": 11}, "its gallery is 10, not 11"),
        ({"seed": 1}, "its seed is 0, not 1"),
        ({"recipe": {"lr": 0.5}}, r"its recipe.lr is 0.1, not 0.5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_audit_of_something_else_is_not_written_over(kept: Path, other: dict[str, Any], words: str) -> None:
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    with pytest.raises(GradveilError, match=f"holds an audit of mnist-samples: {words}; give another --out"):
        run_case(make_case({**FIELDS, **other}), kept, resume=True)
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


def test_an_audit_of_saved_exchanges_is_not_gone_on_with_as_another(kept: Path, tmp_path: Path) -> None:
    saved = json.loads((kept / "audit.json").read_text())
    saved["case"] = {"observations": ["taps"], "gallery": 10, "seed": 0}
    (tmp_path / "audit.json").write_text(json.dumps(saved))
    with pytest.raises(GradveilError, match="holds an audit of saved exchanges"):
        Store(tmp_path).open(resume=True, case=make_case(FIELDS).as_json())


@pytest.mark.integration
def test_attacks_and_defenses_may_be_added(kept: Path) -> None:
    more: dict[str, Any] = {"attacks": ["analytic", "identify"], "defenses": ["none", "noise"], "restarts": 1}
    result = run_case(make_case({**FIELDS, **more}), kept, resume=True)
    crossed = {(row.attack, row.defense) for row in result.rows if not row.is_prior}
    assert crossed == {(attack, defense) for attack in more["attacks"] for defense in more["defenses"]}


def test_the_page_names_observations_as_they_are_named(kept: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit-folder.md").read_text()
    name = Store(kept).observation("noise:sigma=0.1").name
    assert f"as {name.removesuffix('.safetensors')};" in page
