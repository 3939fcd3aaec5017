"""The colors of all pages and figures, for light and dark paper, and how each group of methods looks.

The palette is that of Okabe and Ito with a darker grey, a brown and a violet. People with the common kinds of color
blindness can tell its colors apart (measured by tests/reporting/test_palette.py); symbols differ too.

Figures are written in the light colors; pages swap them by `DARK` where the reader prefers a dark page.
"""

from __future__ import annotations

from typing import NamedTuple

INK, MUTED, GRID, PAPER = "#1c2024", "#6b7076", "#e3e3de", "#fdfdfb"
PALE = "#b9bec2"  # for bars and lines that many others cross
BLACK, GREY, BLUE, SKY, PURPLE = "#000000", "#707070", "#0072b2", "#56b4e9", "#cc79a7"
ORANGE, GREEN, VERMILION = "#e69f00", "#009e73", "#d55e00"
OLIVE, BROWN, VIOLET = "#a89a00", "#6e3e1a", "#572f7f"  # Okabe and Ito's yellow is too pale for a white page
SCALE = ["#f3f5f6", "#5ab4e6"]  # pale enough for ink on it
# From a little to much, for lines and points.
SHADES = ["#9cc4e4", "#74acd8", "#4f93c8", "#3279b0", "#1f6096", "#13497a", "#0a345d"]
DARK_SHADES = ["#33506b", "#3c668c", "#4a7fae", "#5d98ca", "#7bb0de", "#a0c8ec", "#cbe2f8"]
DARK = {
    INK: "#e8e8e4",
    MUTED: "#9ba1a8",
    GRID: "#2e3338",
    PAPER: "#16191c",
    PALE: "#4e565e",
    BLACK: "#ffffff",
    OLIVE: "#f0e442",
    BLUE: "#2b8fd0",
    GREY: "#bbbbbb",
    BROWN: "#ebac9a",
    VIOLET: "#6f58d0",
    SCALE[0]: "#20252a",
    SCALE[1]: "#1b5f8c",
    **dict(zip(SHADES, DARK_SHADES, strict=True)),
}
VARIABLES = {  # of the pages' style sheets: light, dark
    "ink": (INK, DARK[INK]),
    "muted": (MUTED, DARK[MUTED]),
    "grid": (GRID, DARK[GRID]),
    "paper": (PAPER, DARK[PAPER]),
    "raised": ("#f4f4f0", "#1e2226"),
    "accent": (BLUE, SKY),
    "best": ("#e2eff7", "#1d3a4d"),
    "shade": ("#1c202424", "#00000090"),
    "heat": (ORANGE, "#a8640a"),  # activations; ink stays readable on it
}


def css() -> str:
    """The variables as a style sheet."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in VARIABLES.items()) for i in (0, 1))
    return (
        f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )


class Style(NamedTuple):
    """How one group looks in every figure."""

    color: str
    symbol: str  # plotly's
    glyph: str  # a letter that looks like it


GROUPS = {
    "batchtopk": Style(BLACK, "x", "✖"),  # the paper's black cross
    "topk": Style(GREY, "square", "■"),
    "matryoshka": Style(VIOLET, "triangle-left", "◀"),
    "jumprelu": Style(BROWN, "star", "★"),
    "l2": Style(BLUE, "circle", "●"),
    "squared_l2": Style(SKY, "square-open", "□"),  # open, for it often lies on top of l2
    "entropy": Style(PURPLE, "diamond", "◆"),
    "uniform": Style(ORANGE, "triangle-up", "▲"),
    "released": Style(GREEN, "triangle-right", "▶"),
    "annealed": Style(VERMILION, "triangle-down", "▼"),
}
FREE = [Style(OLIVE, "hexagon", "⬢"), Style(VIOLET, "cross", "✚"), Style(BROWN, "pentagon", "⬟")]
"""For groups of others."""
TOOLKITS = {
    "sampled-sae": BLUE,
    "saelens": VERMILION,
    "saelens-raw": BROWN,
    "dictionary_learning": ORANGE,
    "dictionary_learning-raw": GREEN,
    "sparsify": PURPLE,
    "sparsify-adam": SKY,
}
"""In figures beside other toolkits."""
