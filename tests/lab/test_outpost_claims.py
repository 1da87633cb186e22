"""The studies behind single claims of OUTPOST: what they measure with is right, and the page shows their rows."""

import pytest
import torch
from outpost_claims import CAT, GRADIENT, STUDIES, Placed, caught, cosine, network, pond, rebuilt, seen_by
from outpost_page import PAGE, SHOWN, filled, rows, table

from gradveil.defenses.outpost import layers


def test_the_tables_of_the_page_are_those_of_the_rows() -> None:
    page = PAGE.read_text()
    assert filled(page, rows()) == page


def test_every_study_with_rows_is_on_the_page_and_can_be_run_again() -> None:
    with_rows = {row["study"] for row in rows()}
    assert with_rows <= STUDIES.keys() == SHOWN.keys()
    assert all(f"<!-- {study} -->\n|" in PAGE.read_text() for study in with_rows)


def test_a_table_has_a_line_for_each_row_and_a_hole_for_what_is_missing() -> None:
    about = {"study": "fishing", "cats": 1}
    bare = {**about, "defense": "none", "found": {"questions": 2, "psnr": 20.04, "identified": True, "seconds": 3.0}}
    noisy = {**about, "defense": "noise:sigma=0.1", "found": {"questions": 2, "psnr": 6.0}}
    assert table("fishing", [bare, {"study": "delay", "found": {}}, noisy]).splitlines() == [
        "| cats | defense | questions | PSNR | identified |",
        "| --- | --- | ---: | ---: | ---: |",
        "| 1 | none | 2 | 20.0 | yes |",
        "| 1 | `noise:sigma=0.1` | 2 | 6.0 |  |",
    ]


@pytest.mark.parametrize("where", ["largest", "smallest"])
def test_noise_lies_on_the_entries_that_were_asked_for(where: str) -> None:
    net = network("lenet:init=wide")
    batch = net.data.batch([0])
    bare, sent = (seen_by(net, batch, defense=one, recipe=GRADIENT).reply for one in ("none", Placed(where)))
    assert cosine(bare, sent) < 0.999
    for names in layers(bare):
        before, after = (torch.cat([tree[name].flatten() for name in names]) for tree in (bare, sent))
        changed = before != after
        assert abs(int(changed.sum()) - 0.4 * len(before)) <= 0.01 * len(before)
        inside, outside = before[changed].abs(), before[~changed].abs()
        assert (inside.min() >= outside.max()) if where == "largest" else (inside.max() <= outside.min())


@pytest.mark.parametrize("cats", [1, 4])
def test_a_batch_to_fish_in_has_so_many_of_the_class(cats: int) -> None:
    batch = pond(network("lenet:init=wide"), cats, 32)
    assert len(batch) == 32
    assert (batch.labels == CAT).nonzero().flatten().tolist() == list(range(cats))


def test_fishing_isolates_the_gradient_of_one_of_two_cats() -> None:
    row = caught(network("lenet:init=wide"), 2, 16).row
    assert row["cosine"] > 0.999
    assert 4 <= row["questions"] <= 10


def test_single_digits_are_rebuilt_from_their_gradients() -> None:
    net = network("mlp:normalize=true", "mnist-samples")
    row = rebuilt(net, [net.data.batch([0]), net.data.batch([1])], "analytic", recipe=GRADIENT)
    assert (row["identified"], row["images"], row["labels_right"]) == (2, 2, 1.0)
    assert row["psnr"] > 60
