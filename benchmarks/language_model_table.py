"""Print the tables of docs/language-models-v01.md from the JSON files beside it, and draw its figure (with --figure).

python benchmarks/language_model_table.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from sampled_sae.reporting.palette import GROUPS

DOCS = Path(__file__).parent.parent / "docs"
COLORS = {name: GROUPS[name.lower()].color for name in ("BatchTopK", "TopK", "uniform", "l2", "entropy")}
HEADS = ("", "lr", "FVU", "CE recovered", "over 10%", "dead", "FVU, training-time selection", "s")

Line = dict[str, Any]


def runs(*parts: str) -> list[Line]:
    """SAEs trained on all tokens, from these files."""
    read = (json.loads((DOCS / "language-models" / f"{name}.json").read_text()) for name in parts)
    return [line for part in read for line in part["runs"]]


def fvu(line: Line) -> float:
    value: float = line["core"]["normal"]["fvu"]["value"]
    return value


def by(key: str, lines: Iterable[Line]) -> list[list[Line]]:
    """Lines grouped by a key, the group with the lowest mean FVU first."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(line[key], []).append(line)
    return sorted(found.values(), key=lambda lines: mean(map(fvu, lines)))


def form(values: list[float], digits: int) -> str:
    """A single value, or mean and range over seeds."""
    text = f"{mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def row(lines: list[Line]) -> list[str]:
    """One method at its best learning rate."""
    cores = [line["core"] for line in lines]
    return [
        lines[0]["name"] + (f", {len(lines)} seeds" if len(lines) > 1 else ""),
        f"{lines[0]['lr']:g}",
        form([fvu(line) for line in lines], 4),
        form([core["loss"]["ce_recovered"]["value"] for core in cores], 4),
        form([core["density"]["over_10_percent"]["value"] for core in cores], 4),
        form([line["dead"] for line in lines], 2),
        form([core["trained"]["fvu"]["value"] for core in cores], 4),
        form([mean(line["seconds"] for line in lines)], 0),
    ]


def rates_row(lines: list[Line]) -> list[str]:
    """FVU of one method's first seed at each learning rate that was tried on all tokens, the best one bold."""
    best = min(map(fvu, lines))
    shown = [(line["lr"], fvu(line)) for line in sorted(lines, key=lambda line: line["lr"]) if line["seed"] == 0]
    words = [f"{form([value], 3)} at {lr:g}" for lr, value in shown]
    return [lines[0]["name"], ", ".join(f"**{w}**" if v == best else w for w, (_, v) in zip(words, shown, strict=True))]


def table(heads: Iterable[str], rows: Iterable[list[str]]) -> None:
    heads = list(heads)
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


def draw() -> None:
    """FVU against the fraction of live latents; the learning rates of one method are joined by a line."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for lines in by("name", runs("rates", "full", "others")):
        lines.sort(key=lambda line: line["lr"])
        name = lines[0]["name"]
        first = name.split(",")[0].split(" ")[0]
        symbol = "diamond" if "released" in name else "star" if "then" in name else "circle"
        figure.add_scatter(
            x=[1 - line["dead"] for line in lines], y=[fvu(line) for line in lines], name=name,
            text=[f"{line['lr']:g}" for line in lines], mode="markers+lines",
            line={"color": COLORS[first], "width": 1, "dash": "dot"},
            marker={"color": COLORS[first], "symbol": symbol, "size": 8 + 4 * (symbol == "star")},
        )  # fmt: skip
    figure.update_yaxes(type="log", title="FVU at the inference threshold (lower is better)", range=[-1.12, -0.4])
    figure.update_yaxes(tickvals=(ticks := (0.08, 0.09, 0.1, 0.12, 0.15, 0.2, 0.3)), ticktext=[f"{t:g}" for t in ticks])
    figure.update_xaxes(title="latents that fired in training's last 10M tokens", tickformat=".0%", range=[0, 1.02])
    words = "SmolLM2 layer 12, 25M tokens, d_sae = 65,536, K = 60, up to four learning rates each"
    above = "above the range: constant uniform pools, entropy l = 3, and entropy l = 30 and 100 at some rates"
    title = {"text": f"{words}<br><sup>{above}</sup>"}
    figure.update_layout(title=title, width=1100, height=620, template="plotly_white", font={"size": 14})
    figure.write_image(DOCS / "images" / "language-model.png", scale=1.5)


if __name__ == "__main__":
    table(HEADS, map(row, by("name", runs("final"))))
    print()
    table(("", "FVU at each learning rate"), map(rates_row, by("name", runs("rates", "full", "others"))))
    if "--figure" in sys.argv:
        draw()
