"""Colors that people with the common kinds of color blindness can tell apart."""

import itertools

import pytest

from sampled_sae.reporting.palette import DARK, GROUPS, PAPER, TOOLKITS, VARIABLES, css

# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
KINDS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def linear(color: str) -> list[float]:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(color: str, kind: str) -> list[float]:
    """CIE L*a*b* of a color as someone of that kind sees it."""
    r, g, b = (max(0.0, sum(w * c for w, c in zip(row, linear(color), strict=True))) for row in KINDS[kind])
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)]


def distance(one: str, other: str, kind: str) -> float:
    return sum((a - b) ** 2 for a, b in zip(lab(one, kind), lab(other, kind), strict=True)) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dark", [False, True])
def test_groups_and_toolkits_can_be_told_apart(kind: str, dark: bool) -> None:
    def seen(color: str) -> str:
        return DARK.get(color, color) if dark else color

    for colors in ([style.color for style in GROUPS.values()], list(TOOLKITS.values())):
        for one, other in itertools.combinations(colors, 2):
            assert distance(seen(one), seen(other), kind) > 8, (one, other)
        assert all(distance(seen(color), seen(PAPER), kind) > 25 for color in colors)


def test_text_is_readable() -> None:
    def light(color: str) -> float:
        r, g, b = linear(color)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for name in ("ink", "muted", "accent"):
        for text, paper in zip(VARIABLES[name], VARIABLES["paper"], strict=True):
            low, high = sorted((light(text), light(paper)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, name
    assert css().count("--ink:") == 2
