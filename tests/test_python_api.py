"""Gradveil from Python, as design and README show it: objects in, results with pictures out."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import gradveil as gv
from gradveil import api
from gradveil.attacks import Attack, InvertingGradients, Reconstruction
from gradveil.auditing import read_audit
from gradveil.core.progress import Progress
from gradveil.core.streams import Stream
from gradveil.core.types import Params
from gradveil.data import load
from gradveil.defenses import Chain, Defense, Log, Noise, Step, Transform
from gradveil.report import render
from gradveil.threat import Knowledge, Observation

IMAGES, LABELS = load("mnist-samples").batch(range(2)).inputs, load("mnist-samples").batch(range(2)).labels


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Sigmoid(), nn.Linear(16, 10))


class Mine(Transform):
    """A defense of one's own, registered nowhere: sends the signs only."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:
        del rng
        log.add("scale", self.scale)
        return {name: self.scale * tensor.sign() for name, tensor in tree.items()}


@dataclass(frozen=True, kw_only=True)
class Grey(Attack):
    """An attack of one's own: one grey for every pixel, or the first candidate."""

    level: float = 0.5
    chooses: bool = False

    @property
    def requires(self) -> frozenset[Knowledge]:  # type: ignore[override]
        return frozenset({Knowledge.CANDIDATES} if self.chooses else ())

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        del seeds, progress
        shape = seen[0].domain.shape
        return [Reconstruction.closed_form(torch.full((1, *shape), self.level), torch.tensor([0]), 1.0) for _ in seen]


@pytest.mark.integration
def test_the_first_page_of_the_design(tmp_path: Path) -> None:
    model, images, labels = small_model(), IMAGES, LABELS
    result = gv.audit(
        model, (images, labels), defenses=[gv.defenses.Noise(sigma=1.0), Mine()], attacks="quick", progress=False
    )
    assert [verdict.defense for verdict in result.verdicts] == ["noise:sigma=1.0", "Mine:at=step,scale=1.0"]
    assert result.verdicts[0].grade in "ABCDF"
    assert result.case["budget"] == "quick"
    tried = {"analytic", "informed", "identify", "replay", "prior-only"}
    assert {row.attack.partition(":")[0] for row in result.rows} == tried
    for row in result.rows:
        assert row.images.shape == images.shape
        assert 0 <= row.images.min() <= row.images.max() <= 1
    assert torch.equal(result.private_images, images)
    page = result.report(tmp_path / "report.html")
    assert "Mine" in page.read_text()


def test_a_row_has_its_pictures_beside_its_record() -> None:
    result = gv.audit(small_model(), (IMAGES, LABELS), attacks="analytic", progress=False)
    (row,) = result.rows
    assert (row.attack, row.defense, row.identified) == ("analytic", "none", 1.0)
    assert torch.allclose(row.images, IMAGES, atol=1e-3), "one digit is read off the first layer exactly"
    assert row.record.images == 2
    with pytest.raises(AttributeError):
        row.colour  # noqa: B018


def test_the_files_live_as_long_as_the_result_or_a_row_of_it(tmp_path: Path) -> None:
    result = gv.audit(small_model(), (IMAGES, LABELS), attacks=Grey(), progress=False)
    folder, row = result.folder, result.rows[0]
    del result
    gc.collect()
    assert float(row.images.mean()) == 0.5
    del row
    gc.collect()
    assert not folder.exists()
    kept = gv.audit(small_model(), (IMAGES, LABELS), attacks=Grey(), progress=False, out=tmp_path / "kept")
    assert kept.audit == read_audit(tmp_path / "kept")
    with pytest.raises(gv.GradveilError, match="holds an audit already: give out= another folder"):
        gv.audit(small_model(), (IMAGES, LABELS), attacks=Grey(), out=tmp_path / "kept")


def test_an_attacker_who_knows_a_defense_of_ones_own_has_no_counter_move(tmp_path: Path) -> None:
    chain = Chain([Noise(sigma=0.01), Mine(scale=2.0)])
    attack = "informed:iterations=2,restarts=1"
    result = gv.audit(
        small_model(), (IMAGES, LABELS), defenses=[chain, Mine()], attacks=[attack, "identify"], threat="D",
        out=tmp_path / "own", progress=False,
    )  # fmt: skip
    moves = {row.defense: row.counter_moves for row in result.rows if row.attack == attack}
    mixed = moves["noise:sigma=0.01+Mine:at=step,scale=2.0"]
    assert list(mixed) == ["noise:sigma=0.01", "Mine:at=step,scale=2.0"]
    assert mixed["noise:sigma=0.01"] is not None
    assert mixed["Mine:at=step,scale=2.0"] is None
    assert moves["Mine:at=step,scale=1.0"] == {"Mine:at=step,scale=1.0": None}
    assert {row.log["scale"] for row in result.rows if not row.is_prior} == {1.0, 2.0}
    assert "no counter-move" in render(tmp_path / "own").read_text()


def test_attacks_are_objects_too() -> None:
    search = InvertingGradients(iterations=2, restarts=1, lr=0.05)
    chooser = Grey(level=0.25, chooses=True)
    result = gv.audit(
        small_model(), (IMAGES, LABELS), defenses=Mine(), attacks=[search, Grey(), chooser], threat="D", progress=False
    )
    attacks = [row.attack for row in result.rows]
    assert attacks == [
        "ig:iterations=2,lr=0.05,restarts=1", "Grey:chooses=false,level=0.5", "Grey:chooses=true,level=0.25",
        "prior-only",
    ]  # fmt: skip
    assert [row.needs for row in result.rows[:3]] == [("batch-size",), (), ("candidates",)]
    assert float(result.rows[2].images.max()) == 0.25
    with pytest.raises(gv.GradveilError, match="needs candidates, which threat C lacks"):
        gv.audit(small_model(), (IMAGES, LABELS), attacks=chooser, threat="C")
    with pytest.raises(gv.GradveilError, match=r"'Grey:chooses=false,level=0.5' stands twice"):
        gv.audit(small_model(), (IMAGES, LABELS), attacks=[Grey(), Grey()])


class Wider(Defense):
    """Changes the architecture, and no file could say how."""

    reshapes = True

    def on_model(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model, nn.Linear(10, 10))


def test_an_architecture_that_no_file_can_name_is_audited_and_not_saved(tmp_path: Path) -> None:
    result = gv.audit(
        small_model(), (IMAGES, LABELS), defenses=["none", Wider()], attacks="analytic", out=tmp_path, progress=False
    )
    files = {row.defense: row.files.observation for row in result.rows}
    assert files["Wider"] is None
    assert [path.name for path in (tmp_path / "observations").iterdir()] == [Path(files["none"]).name]


def test_a_result_shows_itself() -> None:
    result = gv.audit(small_model(), (IMAGES, LABELS), defenses=["none", Mine()], attacks="analytic", progress=False)
    text = str(result).splitlines()
    assert text[0] == "Audit of 2 rows:"
    assert text[1].startswith("grade F    Without a defense, all 2 private images were picked out of")
    shown = result._repr_html_()
    assert shown.count("data:image/png;base64,") == 2 + 2 * 2
    assert "analytic on Mine:at=step,scale=1.0" in shown
    assert repr(result.rows[0]) == "<analytic on none: 100% identified>"
    assert json.dumps(result.as_json())


def test_what_takes_long_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    for patience, shown in ((0.0, True), (100.0, False)):
        screen = Screen()
        monkeypatch.setattr("sys.stderr", screen)
        monkeypatch.setattr(api, "_PATIENCE", patience)
        gv.audit(small_model(), (IMAGES, LABELS), attacks="ig:iterations=3,restarts=1")
        assert ("ig:iterations=3" in screen.getvalue()) == shown
    monkeypatch.setattr("sys.stderr", io.StringIO())
    titles = []

    class Titles:
        @contextmanager
        def task(self, title: str, total: float | None, *_: object):  # type: ignore[no-untyped-def]
            del total
            titles.append(title)
            yield api._LineTask(api._Line(), title, None)

    gv.audit(small_model(), (IMAGES, LABELS), attacks="analytic", progress=Titles())
    assert titles == ["audit", "clients with none"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "2 examples cannot be cut into batches of 0"),
        ({"batch_size": -1}, "2 examples cannot be cut into batches of -1"),
        ({"seed": -1}, "seed: input should be greater than or equal to 0"),
        ({"budget": "endless"}, "budget: input should be 'quick', 'standard' or 'thorough'"),
        ({"threat": "Z"}, "no threat model is called 'Z'"),
        ({"attacks": "igg"}, "did you mean ig"),
        ({"defenses": ()}, "at least one defense"),
        ({"gallery": torch.zeros(3, 1, 9, 9)}, "pictures of another shape"),
    ],
)
def test_what_does_not_fit_is_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(gv.GradveilError, match=message) as caught:
        gv.audit(small_model(), (IMAGES, LABELS), **{"attacks": "analytic", **change})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_errors_are_caught_by_kind(tmp_path: Path) -> None:
    normed = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))
    with pytest.raises(gv.errors.UnfitModelError, match="batch norm"):
        gv.audit(normed, (IMAGES, LABELS), defenses="dp", attacks="analytic")
    with pytest.raises(gv.errors.UnfitModelError, match="batch norm"):
        gv.protect(normed, torch.optim.SGD(normed.parameters(), lr=0.1), nn.functional.cross_entropy, defense="dp")
    for spec in ("nose", "noise:sigma", "noise:sigma=many", "noise:shade=2"):
        with pytest.raises(gv.errors.SpecError):
            gv.audit(small_model(), (IMAGES, LABELS), defenses=spec)
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(gv.errors.BadFileError):
        read_audit(tmp_path)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gv.protect(model, optimizer, nn.functional.cross_entropy, defense="noise")
    nn.functional.cross_entropy(model(IMAGES), LABELS).backward()
    with pytest.raises(gv.errors.RefusedError):
        optimizer.step()
    kinds = (gv.errors.UnfitModelError, gv.errors.SpecError, gv.errors.BadFileError, gv.errors.RefusedError)
    assert all(issubclass(kind, gv.GradveilError) for kind in kinds)


class Careless(Defense):
    """Edits in place all that it gets."""

    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        return inputs.zero_()

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        for tensor in (*step.params.values(), *gradient.values(), step.batch.labels):
            tensor.zero_()
        return gradient


def test_a_defense_that_edits_in_place_changes_no_other_row() -> None:
    alone = gv.audit(small_model(), (IMAGES, LABELS), attacks="ig:iterations=3,restarts=1", progress=False)
    other = gv.audit(
        small_model(),
        (IMAGES, LABELS),
        defenses=[Careless(), "none"],
        attacks="ig:iterations=3,restarts=1",
        progress=False,
    )
    (row,) = [one for one in other.rows if one.defense == "none"]
    assert torch.equal(row.images, alone.rows[0].images)
    torch.testing.assert_close(other.private_images, IMAGES, rtol=1e-5, atol=0)


def test_candidates_are_not_told_apart_by_labels_that_only_private_ones_have() -> None:
    class Nothing(Defense):
        def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
            return {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}

    labelled: list[Tensor] = []

    class Looks(Attack):
        requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES})

        def run(self, seen: Sequence[Observation], seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
            del seeds, progress
            known = seen[0].candidates
            assert known is not None
            labelled.append(known.batch(range(len(known))).labels)
            return [Reconstruction.closed_form(known.batch([5]).inputs, torch.tensor([0]), 0.0) for _ in seen]

    gv.audit(small_model(), (IMAGES, LABELS), defenses=Nothing(), attacks=Looks(), threat="D", progress=False)
    assert set(labelled[0].tolist()) == {-1}, "nobody has a label, private or not"
