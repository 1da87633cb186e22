"""Veil against somebody who wants its certificate to say less than was spent, or its kept features to be others'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradveil
from gradveil import models
from gradveil.bounds import best_psnr, certificate
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT
from gradveil.core.streams import Stream
from gradveil.core.tensor_files import write_tensors
from gradveil.core.types import Batch, Recipe
from gradveil.data import load
from gradveil.data.sets import MemoryImages
from gradveil.defenses import DEFENSES, Ledger, Veil
from gradveil.federated.case import Training
from gradveil.federated.rounds import Federation
from gradveil.models import PublicFeatures, encoded, features

MODEL = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
INPUTS, LABELS = torch.rand(40, 3, 2, 2), torch.arange(40) % 3


@pytest.mark.parametrize(
    "spec",
    [
        "rounds=1" + 400 * "0",
        "cohort=1" + 400 * "0",
        "lineup=1" + 330 * "0",
        "mu=1e300",
        "mu=1e-320",
        "epsilon=1e300",
        "ceiling=0.010000000000000002",
    ],
)
def test_a_promise_out_of_all_measure_is_refused_in_a_line(spec: str) -> None:
    with pytest.raises(GradveilError, match="defense veil"):
        DEFENSES.build(f"veil:{spec}")


@pytest.mark.parametrize("options", [{"mu": True}, {"mu": "1"}, {"mu": 10**400}, {"ceiling": "0.1"}, {"epsilon": True}])
def test_what_is_no_number_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(GradveilError, match="a number above 0"):
        Veil(**options)  # type: ignore[arg-type]


def test_errors_name_the_defense_that_was_asked_for() -> None:
    with pytest.raises(GradveilError, match="defense veil: delta"):
        Veil(delta=2.0)


def test_steps_with_less_noise_count_in_every_line_of_a_certificate() -> None:
    defense, spent = Veil(), Ledger()
    planned = certificate(defense, spent).psnr
    assert planned == pytest.approx(best_psnr(defense.sigma, 40))
    spent.add(4.0, 1.0, 3)
    found = certificate(defense, spent)
    assert planned is not None
    assert found.psnr is None or found.psnr > planned
    spent.add(0.01, 1.0, 1)
    assert certificate(defense, spent).psnr is None


def test_a_step_without_noise_leaves_no_certificate() -> None:
    spent = Ledger()
    spent.add(0.0, 1.0, 1)
    for defense, ledger in ((Veil(), spent), (DEFENSES.build("dp:sigma=0,steps=3"), Ledger())):
        with pytest.raises(GradveilError, match="without noise"):
            certificate(defense, ledger)


def test_training_that_another_defense_left_bare_leaves_no_certificate() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradveil.protect(model, optimizer, nn.functional.cross_entropy, defense="noise:sigma=1") as guard:
        guard.loss(model(INPUTS), LABELS).backward()
        optimizer.step()
    guard = gradveil.protect(model, optimizer, nn.functional.cross_entropy, defense="veil")
    with pytest.raises(GradveilError, match="without noise"):
        guard.certificate()
    guard.close()


@pytest.mark.parametrize(("option", "value"), [("cohort", 100), ("sigma", 50.0), ("steps", None), ("rounds", 400)])
def test_options_that_were_changed_behind_its_back_leave_no_certificate(option: str, value: object) -> None:
    defense, spent = Veil(), Ledger()
    spent.add(defense.sigma, 1.0, 1)
    object.__setattr__(defense, option, value)
    with pytest.raises(GradveilError, match="changed after it was made"):
        certificate(defense, spent)


@pytest.mark.parametrize("mu", [0.01, 0.37, 1.0, 2.5])
def test_what_is_written_is_never_less_than_what_is_proved(mu: float) -> None:
    found = certificate(Veil(mu=mu, rounds=7), Ledger())
    for size, share in found.recognised.items():
        written = found.text.split(f"% in a line-up of {size}")[0].split()[-1]
        assert share <= float(written) / 100 + 1e-9 < share + 1.1e-3
    assert float(found.text.split("together are (")[1].split(",")[0]) >= found.epsilon * (1 - 1e-6)


def test_a_certificate_says_what_it_rests_on() -> None:
    text = certificate(Veil(), Ledger()).text
    assert "each candidate of a line-up is as likely" in text
    assert "no part in another training" in text
    drawn = certificate(DEFENSES.build("dp:sigma=1,steps=10,sample_rate=0.1"), Ledger())
    assert "rates of 0.1 to 0.1" in drawn.text


def test_a_share_of_the_noise_covers_one_step() -> None:
    """A second local step starts from parameters that hold an example under the client's own small noise."""
    batch, sent = Batch(INPUTS, LABELS), dict(MODEL.named_parameters())
    for recipe in (Recipe(sends="delta", lr=0.1, epochs=2), Recipe(sends="delta", lr=0.1, batch_size=8)):
        with pytest.raises(GradveilError, match="a reply is one step"):
            SimulatedClient(MODEL, recipe=recipe, defense=Veil(cohort=4)).reply(sent, batch, Stream.seeded(0, "a"))
    client = gradveil.Client(MODEL, defense=Veil(cohort=4))
    client.step(INPUTS, LABELS)
    with pytest.raises(GradveilError, match="a reply is one step"):
        client.step(INPUTS, LABELS)
    assert client.certificate().taken == 1
    assert "plain SGD" in client.certificate().text


@pytest.mark.parametrize("options", [{"kind": "Adam"}, {"kind": "SGD", "momentum": 0.9}])
def test_a_share_of_the_noise_covers_plain_sgd_only(options: dict[str, object]) -> None:
    kind = getattr(torch.optim, str(options.pop("kind")))
    client = gradveil.Client(MODEL, defense=Veil(cohort=4), optimizer=lambda p: kind(p, lr=0.1, **options))
    with pytest.raises(GradveilError, match="SGD without momentum"):
        client.step(INPUTS, LABELS)


def test_nobody_is_shown_a_reply_that_only_a_sum_hides() -> None:
    client = gradveil.Client(MODEL, defense=Veil(cohort=4))
    with pytest.raises(GradveilError, match="a reply alone"):
        client.observe(INPUTS, LABELS)


@pytest.mark.parametrize(
    "spec", ["veil:cohort=4+sparsify", "veil:cohort=4+clip:bound=1", "sparsify:at=update+veil:cohort=4"]
)
def test_nothing_changes_a_reply_before_the_sum(spec: str) -> None:
    with pytest.raises(GradveilError, match="before the sum"):
        DEFENSES.build(spec)
    DEFENSES.build(spec.replace(":cohort=4", ""))


def test_a_training_sums_a_whole_cohort_or_nothing() -> None:
    data = load("cifar10-samples").subset(range(12))
    case = Training(data="cifar10-samples", clients=4, per_round=3, algorithm="fedsgd", defense="veil:cohort=4")
    with pytest.raises(GradveilError, match="more than the 3 clients of a round"):
        Federation(case, data)
    federation = Federation(Training(**case.as_json() | {"per_round": None}), data)
    federation.round(1)
    federation.ledgers[2].add(1.0, 1.0, 40)  # this client has taken all steps that are planned
    with pytest.raises(GradveilError, match="3 replies have less noise than the cohort of 4"):
        federation.round(2)


def test_a_mean_that_begins_after_the_last_round_is_refused() -> None:
    with pytest.raises(GradveilError, match="after the last of 3 rounds"):
        Training(rounds=3, average_from=4)


class Bytes(nn.Module):
    """Stands in for the backbones: it says what it was given."""

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return torch.stack([pictures.mean(dim=(1, 2, 3)), pictures[:, 0, 0].mean(dim=1), pictures[:, 0, -1, 0]], dim=1)


def model_on(monkeypatch: pytest.MonkeyPatch, folder: Path, *, mean: float = 0.1) -> PublicFeatures:
    monkeypatch.setenv("GRADVEIL_CACHE", str(folder))
    monkeypatch.setattr(features, "KEPT_FROM", 4)
    monkeypatch.setattr(features, "Backbones", lambda *_, **__: Bytes())
    monkeypatch.setattr(features, "public_directions", lambda *_: (torch.full((3,), mean), torch.eye(3)))
    domain, names = pictures(4, 6).domain, ("efficientnet-lite0",)
    return PublicFeatures(domain, names, pca=0, whiten=0.5, mirror=False, bias=True, progress=SILENT)


def pictures(height: int, width: int) -> MemoryImages:
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(5, 3, height * width, generator=rng).view(5, 3, height, width)
    labels = torch.zeros(5, dtype=torch.int64)
    return MemoryImages.unscaled(images=images, labels=labels, class_names=("a", "b"), name="some")


def fresh(model: PublicFeatures, data: MemoryImages) -> torch.Tensor:
    with torch.no_grad():
        return model.encode(data.batch(range(len(data))).inputs)


def test_features_of_pictures_of_another_shape_or_model_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = model_on(monkeypatch, tmp_path)
    for data in (pictures(4, 6), pictures(6, 4)):  # the same bytes
        torch.testing.assert_close(encoded(model, data), fresh(model, data))
    other = model_on(monkeypatch, tmp_path, mean=0.4)  # of other public photographs
    torch.testing.assert_close(encoded(other, pictures(4, 6)), fresh(other, pictures(4, 6)))


@pytest.mark.parametrize("how", ["damaged", "folder", "far", "double", "other", "nan"])
def test_kept_features_that_cannot_be_are_computed_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    model, data = model_on(monkeypatch, tmp_path), pictures(4, 6)
    good = encoded(model, data)
    (path,) = (tmp_path / "private").iterdir()
    path.unlink()
    poisoned = {"far": 9 * good, "double": good.double(), "nan": good * torch.nan, "other": good[:3]}
    if how == "damaged":
        path.write_bytes(b"no tensors")
    elif how == "folder":
        path.mkdir()
    else:
        write_tensors(path, "public features", {"features": poisoned[how]}, {})
    torch.testing.assert_close(encoded(model, data), good)


def test_a_cache_that_cannot_be_written_ends_no_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    model, data = model_on(monkeypatch, tmp_path / "file"), pictures(4, 6)
    torch.testing.assert_close(encoded(model, data), fresh(model, data))


@pytest.mark.parametrize(
    ("defense", "shown"),
    [("none", 2), ("veil", 2), ("veil+sparsify", 2), ("censor", 2), ("ats", 4), ("dcs2", 4), ("soteria", 4)],
)
def test_a_defense_that_looks_at_pictures_gets_pictures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, defense: str, shown: int
) -> None:
    model, data = model_on(monkeypatch, tmp_path), pictures(4, 6)
    monkeypatch.setattr(models, "build", lambda *_, **__: model)
    federation = Federation(Training(clients=1, algorithm="fedsgd", defense=defense), data)
    given = list[Batch]()
    for client in (federation._client, federation._head):  # who gets pictures, and who has features already
        monkeypatch.setattr(client, "start", lambda _params, batch, *_, **__: given.append(batch))
    federation.start(0, 1, broadcasts=1)
    assert given[0].inputs.dim() == shown
    assert 0 <= federation.quality(data).accuracy <= 1
