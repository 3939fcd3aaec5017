"""Draw pictures of docs/images from committed results. Needs plotly and kaleido (and a Chrome for it).

speed-*.png from docs/speed, synthsaebench.png from docs/synthetic.

python benchmarks/draw.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sampled_sae.reporting import palette

DOCS = Path(__file__).parent.parent / "docs"
GROUPS_OF = {"BatchTopK": "batchtopk", "TopK": "topk", "l2 l=5": "l2", "uniform l=10": "uniform"}
COLORS = {kind: palette.GROUPS[group].color for kind, group in GROUPS_OF.items()}
TICKS = (0.2, 0.5, 1, 2, 5, 10, 20)
STYLE = {"template": "plotly_white", "font": {"size": 14}, "legend": {"orientation": "h", "y": -0.12}}


def read(name: str) -> Any:
    return json.loads((DOCS / "speed" / f"{name}.json").read_text())


def growth() -> go.Figure:
    """Time per step against m, d, B and K as lines, the lower bounds as dashes."""
    titles = {"m": "d_sae", "d": "d_in", "B": "tokens per batch", "K": "active latents per token K"}
    points, base = read("growth")["points"], read("growth")["base"]
    figure = make_subplots(rows=2, cols=2, horizontal_spacing=0.09, vertical_spacing=0.16)
    for number, (axis, title) in enumerate(titles.items()):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        for kind, color in COLORS.items():
            mine = [p for p in points if p["axis"] == axis and p["kind"] == kind]
            xs = [p[axis] for p in mine]
            common = {"x": xs, "legendgroup": kind, "showlegend": number == 0, "line": {"color": color}}
            figure.add_scatter(y=[p["ms"] for p in mine], name=kind, mode="lines+markers", **common, **place)
            dashed = common | {"line": {"color": color, "dash": "dot", "width": 1.5}}
            figure.add_scatter(
                y=[p["floor_ms"] for p in mine], name=f"{kind}, lower bound", mode="lines", **dashed, **place
            )
        figure.update_xaxes(type="log", title=title, tickvals=xs, ticktext=[short(x) for x in xs], **place)
        figure.update_yaxes(
            type="log", title="ms per step", tickvals=TICKS, ticktext=[f"{t:g}" for t in TICKS], **place
        )
    names = {"m": "d_sae", "d": "d_in"}
    fixed = ", ".join(f"{names.get(key, key)}={value:,}" for key, value in base.items())
    words = f"One training step on an H200 (where not varied: {fixed})"
    return figure.update_layout(title=words, width=1100, height=860, **STYLE)


def short(n: int) -> str:
    return f"{n / 2**20:g}M" if n >= 2**20 else f"{n / 1024:g}k" if n >= 16_384 else str(n)


def peers() -> go.Figure:
    """Bars: milliseconds per step of each program."""
    figures = {name: f["ms"] for name, f in read("step")["figures"].items()}
    shown = [name for name in figures if "half dead" not in name and "groups" not in name]
    shown.sort(key=figures.__getitem__, reverse=True)
    colors = [palette.BLUE if name.startswith("sampled-sae") else palette.GREY for name in shown]
    bar = go.Bar(
        x=[figures[n] for n in shown], y=shown, orientation="h", marker={"color": colors},
        text=[f"{figures[n]:.2f}" for n in shown], textposition="outside",
    )  # fmt: skip
    figure = go.Figure(bar)
    figure.update_xaxes(title="ms per step", range=[0, 76])
    words = "One training step, one run on an H200: d_in=768, d_sae=65,536, K=60, B=4,096, fp32 weights"
    return figure.update_layout(title=words, width=1100, height=640, **STYLE)


def roofline() -> go.Figure:
    """Rates of the kernels of a BatchTopK step and the limits of the machine."""
    rates, kernels = read("growth"), [k for k in read("parts")["kernels"] if k["flop"]]
    bandwidth, speed = rates["bytes_a_second"], rates["operations_a_second"]
    ridge = speed / bandwidth
    figure = go.Figure()
    roof_x = [0.1, ridge, 3000]
    figure.add_scatter(
        x=roof_x, y=[min(speed, bandwidth * x) / 1e12 for x in roof_x], mode="lines", line={"color": palette.INK},
        name=f"measured: {bandwidth / 1e12:.2f} TB/s of a copy, {speed / 1e12:.0f} TFLOP/s of a product in bfloat16",
    )  # fmt: skip
    symbols = ("circle", "square", "diamond", "triangle-up", "star", "x", "cross")
    for kernel, symbol in zip(kernels, symbols, strict=True):
        rate = kernel["bytes"] / kernel["ms"] / 1e9
        figure.add_scatter(
            x=[kernel["flop"] / kernel["bytes"]], y=[kernel["flop"] / kernel["ms"] / 1e9], mode="markers",
            marker={"symbol": symbol, "size": 14}, name=f"{kernel['name']}: {kernel['ms']:.2f} ms, {rate:.1f} TB/s",
        )  # fmt: skip
    figure.update_xaxes(type="log", title="operations per byte", range=[-1, 3.5], dtick=1)
    figure.update_yaxes(type="log", title="TFLOP/s", range=[-0.5, 3.2], dtick=1)
    words = "Roofline of one BatchTopK step on an H200 (points above the roof read rows from the cache)"
    return figure.update_layout(title=words, width=1100, height=640, **STYLE | {"legend": {}})


QUARTER = ", rate x 0.25"
CURVES = {  # recipes at full size: name, color, whether dashed
    f"defaults-early{QUARTER}": ("BatchTopK", palette.BLACK, False),
    "batchtopk": ("BatchTopK, default rate", palette.BLACK, True),
    f"topk_then_batchtopk{QUARTER}": ("TopK, then BatchTopK", palette.BLUE, False),
    f"released:score=l2{QUARTER}": ("BatchTopK, released l2 pool", palette.GREEN, False),
    f"matryoshka{QUARTER}": ("Matryoshka", palette.VIOLET, False),
    "saelens": ("SAELens, published settings", palette.ORANGE, False),
}


def synthsaebench() -> go.Figure:
    """FVE and MCC of SAEs of the published size against the number of training samples."""
    content = json.loads((DOCS / "synthetic" / "synthsaebench-full.json").read_text())
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.09)
    for column, measure in enumerate(("fve", "mcc"), 1):
        for recipe, (name, color, dashed) in CURVES.items():
            runs = [run for run in content["runs"] if run["recipe"] == recipe and run["seed"] == 0]
            figure.add_scatter(
                x=[run["step"] * content["sizes"]["batch_size"] for run in runs], y=[run[measure] for run in runs],
                mode="lines+markers", line={"color": color, "dash": "dot" if dashed else "solid"}, name=name,
                legendgroup=name, showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
        ticks = {"tickvals": [1e6, 2e6, 3e6, 5e6], "ticktext": ["1M", "2M", "3M", "5M"]}
        figure.update_xaxes(title="training samples", type="log", **ticks, row=1, col=column)
        figure.update_yaxes(title=measure.upper(), range=[0, 0.85], row=1, col=column)
    style = STYLE | {"legend": {"orientation": "h", "y": -0.2}, "margin": {"t": 20}}
    return figure.update_layout(width=1100, height=480, **style)


def main() -> None:
    for name, figure in (("speed-growth", growth()), ("speed-peers", peers()), ("speed-roofline", roofline())):
        figure.write_image(DOCS / "images" / f"{name}.png", scale=1.5)
    synthsaebench().write_image(DOCS / "images" / "synthsaebench.png", scale=1.5)


if __name__ == "__main__":
    main()
