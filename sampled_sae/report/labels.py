"""Where labels of points go so that none lies on another label or point; those without room are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

POSITIONS = (
    *("top center", "middle right", "bottom center", "middle left"),
    *("top right", "bottom right", "top left", "bottom left"),
)
"""plotly's names, in the order of preference."""
MARK = 6
"""Half the size of a point, in pixels, with a little air."""


class Box(NamedTuple):
    """In pixels, y upwards."""

    left: float
    low: float
    right: float
    high: float

    def meets(self, other: Box) -> bool:
        return self.left < other.right and other.left < self.right and self.low < other.high and other.low < self.high


def place(
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    size: tuple[float, float],
    font: float = 11,
    others: Sequence[tuple[float, float]] = (),
) -> list[str | None]:
    """Points in shares of the picture ([0, 1] each way) -> for each text its position, or none.

    `size` is the picture's in pixels; in a larger one of the same shares nothing comes nearer. `others` are points
    without a label, which no label may lie on either.
    """
    width, height = size
    pixels = [(x * width, y * height) for x, y in [*points, *others]]
    marks = [Box(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in pixels]
    whole = Box(0, 0, width, height)
    taken: list[Box] = []
    chosen: list[str | None] = []
    for number, text in enumerate(texts):
        for name, box in _around(*pixels[number], 0.62 * font * max(1, len(text)), 1.25 * font):
            inside = whole.left <= box.left and box.right <= whole.right and whole.low <= box.low <= box.high <= height
            in_the_way = [mark for i, mark in enumerate(marks) if i != number]
            if inside and not any(box.meets(other) for other in [*taken, *in_the_way]):
                taken.append(box)
                chosen.append(name)
                break
        else:
            chosen.append(None)
    return chosen


def _around(x: float, y: float, width: float, height: float) -> Iterator[tuple[str, Box]]:
    """The boxes of a text of this size around a point."""
    for name in POSITIONS:
        up, side = name.split()
        low = {"top": y + MARK, "middle": y - height / 2, "bottom": y - MARK - height}[up]
        left = {"left": x - MARK - width, "center": x - width / 2, "right": x + MARK}[side]
        if up != "middle" and side != "center":
            # plotly puts corner labels beside the point, not away from it.
            left += MARK if side == "left" else -MARK
        yield name, Box(left, low, left + width, low + height)
