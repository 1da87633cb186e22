"""Plots are well-formed, honest about gaps, and say in words what they show."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from gradveil.auditing.audit import Trace
from gradveil.report.answers import ShownAnswer
from gradveil.report.svg import MOST_POINTS, objective_curve, share_bar


def traced(steps: Sequence[int], lines: Sequence[Sequence[float | None]]) -> Trace:
    return Trace(steps=tuple(steps), objective=tuple(map(tuple, lines)))


def drawn(trace: Trace, title: str = "ig against none") -> ElementTree.Element:
    svg = objective_curve(trace, title)
    assert svg is not None
    return ElementTree.fromstring(str(svg))


def commands(svg: ElementTree.Element, kind: str) -> list[str]:
    return [path.attrib["d"] for path in svg.iter("path") if path.attrib["class"] == kind]


def test_a_curve_has_a_line_for_each_image_and_their_median() -> None:
    svg = drawn(traced((0, 10, 20), ((1.0, 0.6, 0.5), (2.0, 0.8, 0.7), (3.0, 1.0, 0.9))))
    assert len(commands(svg, "one")) == 3
    assert commands(svg, "median") == [commands(svg, "one")[1]]
    assert svg.attrib["aria-label"] == "ig against none: the median objective goes from 2 to 0.7 over 20 steps"


def test_higher_values_are_drawn_higher() -> None:
    (path,) = commands(drawn(traced((0, 1), ((1.0, 0.5),))), "median")
    first, last = (float(point.split()[1]) for point in path.lstrip("M").split("L"))
    assert first < last  # the y axis of SVG points down


def test_a_wide_range_gets_a_logarithmic_scale() -> None:
    svg = drawn(traced((0, 1, 2), ((1.0, 0.1, 0.01),)))
    assert "logarithmic scale" in svg.attrib["aria-label"]
    (path,) = commands(svg, "median")
    heights = [float(point.split()[1]) for point in path.lstrip("M").split("L")]
    assert abs(heights[1] - (heights[0] + heights[2]) / 2) < 0.1


def test_a_range_that_reaches_zero_stays_linear() -> None:
    assert "logarithmic" not in drawn(traced((0, 1), ((1.0, 0.0),))).attrib["aria-label"]


def test_a_line_breaks_where_there_is_no_value() -> None:
    (path,) = commands(drawn(traced((0, 1, 2, 3, 4), ((4.0, 3.0, None, 2.0, 1.0),))), "median")
    assert path.count("M") == 2
    assert path.count("L") == 2


def test_a_flat_line_and_a_short_one_are_drawn() -> None:
    svg = drawn(traced((0, 1, 2), ((1.0, 1.0, 1.0), (1.0,))))
    assert len(commands(svg, "one")) == 2


def test_long_traces_are_thinned_but_keep_their_ends() -> None:
    steps = range(5000)
    (path,) = commands(drawn(traced(steps, [[5000.0 - s for s in steps]])), "median")
    assert path.count("L") == MOST_POINTS - 1
    assert path.startswith("M42.0 8.0")
    assert path.endswith("L252.0 108.0")


def test_nothing_to_draw_is_none() -> None:
    for trace in (traced((), ()), traced((0,), ((1.0,),)), traced((0, 1), ((None, None),)), traced((0, 1), ())):
        assert objective_curve(trace, "ig") is None


def test_a_hostile_title_stays_text() -> None:
    svg = drawn(traced((0, 1), ((1.0, 0.5),)), title='"><script>alert(1)</script>')
    assert svg.attrib["aria-label"].startswith('"><script>alert(1)</script>')
    assert not list(svg.iter("script"))


def test_the_share_bar_places_its_marks() -> None:
    answer = ShownAnswer("rebuilt", "", 0.75, (0.3, 0.954), 0.01, 0.99, "leaks", "")
    svg = ElementTree.fromstring(str(share_bar(answer)))
    marks = {element.attrib["class"]: element.attrib for element in svg}
    assert marks["share"]["cx"] == "75.0%"
    assert (marks["interval"]["x1"], marks["interval"]["x2"]) == ("30.0%", "95.4%")
    assert marks["chance"]["x1"] == "1.0%"
    assert marks["ceiling"]["x1"] == "99.0%"


def test_a_share_bar_of_unknowns_is_empty() -> None:
    svg = ElementTree.fromstring(str(share_bar(ShownAnswer("rebuilt", "", None, None, None, None, "unknown", ""))))
    assert [element.attrib["class"] for element in svg] == ["track"]
