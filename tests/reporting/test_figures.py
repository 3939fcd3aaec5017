"""The front, and where labels go."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("plotly")

from sampled_sae.reporting.figures import Box, _around, front, place, span, steps
from sampled_sae.utils.measures import Better

# Few different values: ties are the hard part.
POINTS = st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 6).map(float)), max_size=25)
SIDES = st.sampled_from(["low", "high"])


def beats(a: tuple[float, float], b: tuple[float, float], x: Better, y: Better) -> bool:
    """By the definition, one side after the other."""
    as_good = (a[0] <= b[0] if x == "low" else a[0] >= b[0]) and (a[1] <= b[1] if y == "low" else a[1] >= b[1])
    return as_good and a != b


@given(POINTS, SIDES, SIDES)
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]], x: Better, y: Better) -> None:
    kept = front(points, x, y)
    for i, point in enumerate(points):
        assert (i in kept) == (not any(beats(other, point, x, y) for other in points))
        assert i in kept or any(beats(points[j], point, x, y) for j in kept)
    assert [points[i] for i in kept] == sorted(points[i] for i in kept)


@given(POINTS, SIDES, SIDES)
def test_the_front_has_a_best_of_each_number(points: list[tuple[float, float]], x: Better, y: Better) -> None:
    kept = front(points, x, y)
    for axis, better in ((0, x), (1, y)):
        values = [point[axis] for point in points]
        if values:
            best = min(values) if better == "low" else max(values)
            assert best in [points[i][axis] for i in kept]


def test_the_line_runs_along_what_is_dominated() -> None:
    # Lower is better across: up to the next point the front stays at the height of this one.
    assert (steps("low"), steps("high")) == ("hv", "vh")


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_an_axis_holds_all_values_and_is_no_point(values: list[float]) -> None:
    low, high = span(values)
    assert low < high and all(low <= value <= high for value in values)


SHARES = st.tuples(st.floats(0, 1), st.floats(0, 1))


@given(
    st.lists(st.tuples(SHARES, st.text("abc123", min_size=1, max_size=12)), max_size=15), st.lists(SHARES, max_size=5)
)
def test_labels_lie_on_nothing(items: list[tuple[tuple[float, float], str]], others: list[tuple[float, float]]) -> None:
    points, texts = [point for point, _ in items], [text for _, text in items]
    size = (300.0, 200.0)
    boxes = []
    for point, text, where in zip(points, texts, place(points, texts, size, 11, others), strict=True):
        if where:
            around = dict(_around(point[0] * size[0], point[1] * size[1], 0.62 * 11 * len(text), 1.25 * 11))
            boxes.append((point, around[where]))
    for (_, a), (_, b) in itertools.combinations(boxes, 2):
        assert not a.meets(b)
    for own, box in boxes:
        assert box.left >= 0 and box.low >= 0 and box.right <= size[0] and box.high <= size[1]
        for x, y in {*points, *others} - {own}:
            middle = Box(x * size[0], y * size[1], x * size[0], y * size[1])
            assert not box.meets(middle)


def test_a_label_with_room_is_shown_above() -> None:
    assert place([(0.5, 0.5)], ["5"], (300, 200)) == ["top center"]
    assert place([(0.5, 1.0)], ["5"], (300, 200)) == ["middle right"] or place([(0.5, 1.0)], ["5"], (300, 200)) == [
        "bottom center"
    ]
    assert place([(0.5, 0.5)] * 12, ["a long label indeed"] * 12, (300, 200)).count(None) > 0
