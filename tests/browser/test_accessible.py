"""axe-core finds nothing serious on any page, in either theme, at either width."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser.visits import Open
from gradveil.federated import Training, run_training
from gradveil.report import render, render_trainings
from report.saved_audit import write_full_audit

pytestmark = [pytest.mark.browser, pytest.mark.integration]


@pytest.fixture(scope="module", params=["report", "trainings"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all its sections filled, and the curves of two trainings."""
    folder = tmp_path_factory.mktemp("pages")
    if request.param == "report":
        return render(write_full_audit(folder))
    for name in ("none", "outpost"):
        case = Training(data="mnist-samples", model="mlp:hidden=8,depth=1", clients=2, rounds=3, defense=name)
        run_training(case, folder / name)
    return render_trainings([folder / "none", folder / "outpost"], folder / "page.html")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_axe_finds_nothing_serious(visit: Open, page: Path, width: int, theme: str) -> None:
    assert visit(page, width=width, theme=theme).barriers() == []


def test_axe_finds_what_is_wrong(visit: Open, tmp_path: Path) -> None:
    """A page without names for its controls and with faint text fails."""
    sound = render(write_full_audit(tmp_path / "audit")).read_text()
    faint = sound.replace("<style>", "<style>.lead { color: #bbb; }").replace(' alt="', ' data-alt="')
    head, _, rest = faint.partition('<meta http-equiv="Content-Security-Policy"')
    (tmp_path / "page.html").write_text(head + rest.partition(">")[2])
    found = {line.partition(":")[0] for line in visit(tmp_path / "page.html").barriers()}
    assert {"color-contrast", "image-alt"} <= found
