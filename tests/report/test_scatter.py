"""The plot of privacy against utility: dots where they belong, labels that can be read, words for each."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.auditing import Cost, Verdict
from gradveil.auditing.audit import Answer
from gradveil.report.sections import tradeoff
from gradveil.report.svg import LETTER, LINE, RADIUS, REACH, SCATTER, Dot, scatter

SHARES = st.floats(0, 1)


def dot(number: int, lost: float | None, share: float, interval: tuple[float, float] | None = None) -> Dot:
    return Dot(number, f"defense {number}", "leaks", lost, share, interval)


def drawn(*dots: Dot) -> ElementTree.Element:
    return ElementTree.fromstring(str(scatter(dots)))


def circles(svg: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in svg.iter("circle")]


def labels(svg: ElementTree.Element) -> dict[str, tuple[float, float]]:
    found = [text for text in svg.iter("text") if text.attrib.get("class") == "label"]
    return {text.text or "": (float(text.attrib["x"]), float(text.attrib["y"])) for text in found}


def verdict(defense: str, share: float | None, cost: Cost | None = None) -> Verdict:
    return Verdict(defense=defense, attack="ig", identified=share, identified_interval=(0.0, 1.0), cost=cost)


def test_a_private_and_cheap_defense_stands_lower_left() -> None:
    (x, y), (other_x, other_y) = circles(drawn(dot(1, 0.0, 0.1), dot(2, 0.2, 0.9)))
    assert x < other_x
    assert y > other_y, "the y axis of SVG points down"


def test_both_scales_are_linear_and_marked() -> None:
    svg = drawn(*(dot(number, 0.1 * number, 0.25 * number) for number in range(5)))
    places = circles(svg)
    assert len({round(b[0] - a[0], 0) for a, b in pairwise(places)}) == 1
    assert len({round(a[1] - b[1], 0) for a, b in pairwise(places)}) == 1
    marked = {text.text: text.attrib for text in svg.iter("text") if text.attrib.get("class") != "label"}
    assert [float(marked[f"{10 * number}"]["x"]) for number in range(5)] == pytest.approx([x for x, _ in places])
    assert [float(marked[f"{25 * number}%"]["y"]) - 4 for number in range(5)] == pytest.approx([y for _, y in places])


def test_a_small_difference_does_not_look_large() -> None:
    (x, _), (other, _) = circles(drawn(dot(1, 0.0, 0.5), dot(2, 0.002, 0.5)))
    assert 0 < other - x < SCATTER.width / 20


def test_accuracy_gained_stands_left_of_none_lost() -> None:
    svg = drawn(dot(1, 0.0, 0.5), dot(2, -0.03, 0.5))
    (x, _), (other, _) = circles(svg)
    assert other < x
    assert "-3" in [text.text for text in svg.iter("text")]


def test_the_interval_is_a_line_through_the_dot() -> None:
    svg = drawn(dot(1, 0.0, 0.5, (0.25, 0.75)))
    ((x, y),) = circles(svg)
    (line,) = [path.attrib["d"] for group in svg.iter("g") for path in group.iter("path")]
    at, bottom, top = line.removeprefix("M").replace("V", " ").split()
    assert float(at) == x
    assert float(bottom) - y == pytest.approx(y - float(top), abs=0.2)
    assert float(bottom) - y > 50


def test_what_was_not_trained_stands_aside() -> None:
    svg = drawn(dot(1, 0.3, 0.5), dot(2, None, 0.5))
    assert circles(svg)[1][0] > circles(svg)[0][0] + RADIUS
    assert "not trained" in [text.text for text in svg.iter("text")]
    assert [group.attrib["class"] for group in svg.iter("g")] == ["dot leaks", "dot leaks untrained"]
    assert "not trained" not in [text.text for text in drawn(dot(1, 0.3, 0.5)).iter("text")]


def test_dots_in_one_place_share_a_label() -> None:
    assert set(labels(drawn(*(dot(number, 0.1, 1.0) for number in (1, 2, 3, 5))))) == {"1–3, 5"}


def test_what_was_rebuilt_without_candidates_is_a_diamond_below_the_dot_with_its_own_label() -> None:
    svg = drawn(Dot(7, "a defense", "leaks", 0.1, 1.0, (0.8, 1.0), rebuilt=0.25), dot(8, 0.1, 0.25))
    (diamond,) = (path.attrib["d"] for path in svg.iter("path") if path.attrib.get("class") == "rebuilt")
    (x, y), (other_x, other_y) = circles(svg)
    assert diamond.startswith(f"M{other_x - REACH:.1f} {other_y:.1f}l"), "where a dot of that share stands"
    assert (x, y < other_y) == (other_x, True)
    assert labels(svg).keys() == {"7", "7, 8"}


def test_every_dot_says_what_it_is() -> None:
    svg = drawn(dot(1, 0.1, 0.5), dot(2, None, 0.5))
    assert [title.text for title in svg.iter("title")] == ["defense 1", "defense 2"]
    assert svg.attrib["role"] == "img"
    assert "for 2 defenses" in svg.attrib["aria-label"]


@given(places=st.lists(st.tuples(st.none() | SHARES, SHARES), min_size=1, max_size=15))
@settings(max_examples=60, deadline=None)
def test_every_defense_is_labeled_inside_the_frame(places: list[tuple[float | None, float]]) -> None:
    svg = drawn(dot(0, 0.1, 0.5), *(dot(number, *place) for number, place in enumerate(places, start=1)))
    numbers: list[int] = []
    for text, (x, y) in labels(svg).items():
        assert 0 <= x <= x + LETTER * len(text) <= SCATTER.width + 1
        assert 0 <= y <= SCATTER.height
        for part in text.split(", "):
            first, _, last = part.partition("–")
            numbers += range(int(first), int(last or first) + 1)
    assert sorted(numbers) == list(range(len(places) + 1))


def test_labels_of_fifteen_defenses_do_not_cover_each_other() -> None:
    """Nearly all identified nearly everything at nearly no cost, as audits of weak defenses go."""
    dots = [dot(number, 0.004 * number % 0.05, 1 - 0.07 * (number % 3)) for number in range(1, 16)]
    boxes = [(x, y, x + LETTER * len(text), y + LINE) for text, (x, y) in labels(drawn(*dots)).items()]
    assert len(boxes) > 8
    for number, one in enumerate(boxes):
        for other in boxes[number + 1 :]:
            beside = one[2] <= other[0] or other[2] <= one[0]
            assert beside or one[3] <= other[1] or other[3] <= one[1], (one, other)


def test_no_defense_costs_nothing_where_a_cost_is_known() -> None:
    cost = Cost(grade="C", accuracy=0.75, accuracy_lost=0.05, time_added=0.1)
    shown = tradeoff([verdict("none", 1.0), verdict("clip", 0.5, cost), verdict("censor", 0.5), verdict("own", None)])
    assert [(mark.number, mark.lost) for mark in shown.marks] == [(1, 0.0), (2, 0.05), (3, None)]
    assert [mark.accuracy for mark in shown.marks] == [pytest.approx(0.8), 0.75, None]
    assert (shown.untrained, shown.unscored) == ("censor", "own")
    assert shown.plot is not None
    assert "clip: 50% identified, 95% interval 0% to 100%; accuracy lost: 5.0 points" in shown.plot


def test_without_a_training_there_is_no_plot() -> None:
    assert tradeoff([verdict("none", 1.0), verdict("clip", 0.5)]).plot is None


def test_the_share_without_candidates_is_told_beside_the_worst_case() -> None:
    cost = Cost(grade="C", accuracy=0.75, accuracy_lost=0.05, time_added=0.1)
    ranked = verdict("clip", 1.0, cost).model_copy(update={"rebuilt": Answer(attack="gi", share=0.25)})
    shown = tradeoff([verdict("none", 1.0), ranked])
    assert shown.rebuilt
    assert shown.plot is not None
    assert "clip: 100% identified, 95% interval 0% to 100%; without candidates 25%; accuracy lost" in shown.plot
    assert not tradeoff([verdict("none", 1.0), verdict("clip", 0.5, cost)]).rebuilt
