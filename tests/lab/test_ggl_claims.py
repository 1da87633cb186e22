"""The studies behind claims of GGL's paper: what they build on, and that their page is that of their rows."""

from __future__ import annotations

import json

import pytest
import torch
from claims import ROOT
from ggl_claims import STUDIES, PlainBO, cut, measures, page, shown

from gradveil.attacks.parts.population import TuRBO
from gradveil.attacks.parts.search import Problems
from gradveil.core.progress import SILENT
from gradveil.core.types import Params

FILE = ROOT / "docs/results/ggl-claims.jsonl"


def test_the_page_is_that_of_the_rows() -> None:
    rows = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert FILE.with_suffix(".md").read_text() == page(rows)
    assert len({row["digest"] for row in rows}) == len(rows)
    assert {row["study"] for row in rows} <= STUDIES.keys()


def test_the_spread_is_that_between_the_seeds_of_one_image() -> None:
    row = {"study": "seeds", "images": 2, "each": 2, "psnr": [10.0, 12.0, 20.0, 20.0]}
    assert shown(row) == {"images": "2", "each": "2", "psnr": "15.50", "spread": "0.71"}


def test_entries_are_cut_and_their_direction_with_them() -> None:
    assert cut({"w": torch.tensor([3.0, -0.5, -7.0])}, 1.0)["w"].tolist() == [1.0, -0.5, -1.0]


@pytest.mark.integration
@pytest.mark.parametrize("search", [PlainBO, TuRBO])
def test_bayesian_optimisation_beats_random_points_in_two_dimensions(search: type[TuRBO]) -> None:
    pytest.importorskip("botorch")

    def bowl(point: Params) -> tuple[Params, torch.Tensor]:
        return point, (point["code"] - 0.7).square().sum(dim=(1, 2))

    problems = Problems(evaluate=bowl, start={"code": torch.zeros(2, 1, 2)}, seeds=[0, 1])
    with SILENT.task("", None) as task:
        found = search(iterations=12, initial=20).run(problems, task)
    assert found.objectives.max() < 0.02, "the best of 120 random points is some 0.04 on average"


def test_measures_of_faces_tell_a_dark_background_and_light_from_the_left() -> None:
    faces = torch.full((2, 3, 64, 64), 0.5)
    faces[1, :, :, :32] = 0.9
    faces[0, :, :48, :6] = faces[0, :, :48, -6:] = 0.1
    found = measures(faces)
    assert found["background (sides)"][0] < found["background (sides)"][1]
    assert found["pose and light (left less right)"][1] == pytest.approx(0.4, abs=1e-4)
