"""Print the table of docs/language-models.md from the figures beside it, and draw its picture (with --picture).

python benchmarks/language_model_table.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
COLOURS = {"BatchTopK": "#000000", "TopK": "#D55E00", "uniform": "#CC79A7", "l2": "#0072B2", "entropy": "#009E73"}
HEADS = ("", "lr", "FVU", "CE recovered", "over 10%", "alive", "dead at the end", "FVU, own cut", "s")


def runs() -> list[dict[str, Any]]:
    """All SAEs trained on all tokens."""
    read = (json.loads((DOCS / "language-models" / f"{name}.json").read_text()) for name in ("rates", "full", "seeds"))
    return [line for part in read for line in part["runs"]]


def fvu(line: dict[str, Any]) -> float:
    value: float = line["core"]["normal"]["fvu"]["value"]
    return value


def groups() -> list[list[dict[str, Any]]]:
    """Runs that differ in their seed alone, the best first."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for line in runs():
        found.setdefault((line["name"], line["lr"]), []).append(line)
    return sorted(found.values(), key=lambda lines: mean(map(fvu, lines)))


def row(lines: list[dict[str, Any]]) -> list[str]:
    """One line of the table; several seeds as mean and range."""

    def form(values: list[float], digits: int) -> str:
        text = f"{mean(values):.{digits}f}".removeprefix("0")
        ends = [f"{end:.{digits}f}".removeprefix("0") for end in (min(values), max(values))]
        return text if len(values) == 1 else f"{text} ({ends[0]} to {ends[1]})"

    cores = [line["core"] for line in lines]
    return [
        lines[0]["name"] + (f", {len(lines)} seeds" if len(lines) > 1 else ""),
        f"{lines[0]['lr']:g}",
        form([fvu(line) for line in lines], 4),
        form([core["loss"]["ce_recovered"]["value"] for core in cores], 4),
        form([core["density"]["over_10_percent"]["value"] for core in cores], 4),
        form([core["density"]["alive"] for core in cores], 2),
        form([line["dead"] for line in lines], 2),
        form([core["trained"]["fvu"]["value"] for core in cores], 4),
        form([line["seconds"] for line in lines][:1], 0),
    ]


def picture() -> None:
    """FVU against the share of live latents, the rates of one member joined by a line."""
    import plotly.graph_objects as go

    figure, members = go.Figure(), dict[str, list[dict[str, Any]]]()
    for line in runs():
        members.setdefault(line["name"], []).append(line)
    for name, lines in members.items():
        lines.sort(key=lambda line: line["lr"])
        first = name.split(",")[0].split(" ")[0]
        symbol = "diamond" if "released" in name else "star" if "then" in name else "circle"
        figure.add_scatter(
            x=[line["core"]["density"]["alive"] for line in lines], y=[fvu(line) for line in lines], name=name,
            mode="markers+lines", line={"color": COLOURS[first], "width": 1, "dash": "dot"},
            marker={"color": COLOURS[first], "symbol": symbol, "size": 8 + 4 * (symbol == "star")},
        )  # fmt: skip
    figure.update_yaxes(type="log", title="FVU by threshold (lower is better)", range=[-1.12, -0.4])
    figure.update_yaxes(tickvals=(ticks := (0.08, 0.09, 0.1, 0.12, 0.15, 0.2, 0.3)), ticktext=[f"{t:g}" for t in ticks])
    figure.update_xaxes(title="latents that fire on 65,536 held-out tokens", tickformat=".0%", range=[0.3, 1.02])
    words = "SmolLM2 layer 12, 25M tokens, m = 65,536, K = 60 (above it: entropy l = 3, constant uniform pools)"
    figure.update_layout(title=words, width=1100, height=620, template="plotly_white", font={"size": 14})
    figure.write_image(DOCS / "images" / "language-model.png", scale=1.5)


if __name__ == "__main__":
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for lines in groups():
        print(f"| {' | '.join(row(lines))} |")
    if "--picture" in sys.argv:
        picture()
