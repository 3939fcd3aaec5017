"""Collect the results of `sampled-sae eval` and `compare` for the SAEs of language_model.py, and print their tables.

python benchmarks/evaluations.py gather KEPT     # -> docs/smollm2/*.json
python benchmarks/evaluations.py                 # tables and figure of docs/smollm2.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from language_model_table import COLORS, DOCS, by, form, table

FOLDER = DOCS / "smollm2"
PAPER = ("BatchTopK", "l2, l = 5", "entropy, l = 3", "uniform, l = 4")
"""Methods of the paper's probing table; its fourth score, squared L2, selects the same pool as L2."""
KS = ("1", "2", "5", "10")

BESIDE = {
    "entropy, l = 100": "middle right",
    "uniform 25%, released at 70%": "bottom center",
    "l2, l = 30": "middle right",
    "l2, l = 100": "bottom center",
    "l2, l = 5": "bottom center",
    "BatchTopK": "bottom right",
}
"""Positions of labels that would overlap in the figure."""

Found = dict[str, Any]


def gather(kept: Path) -> None:
    """Write core results (of language_model.py), probing and absorption of each SAE, and the comparison to FOLDER."""
    trained = json.loads((DOCS / "language-models" / "final.json").read_text())
    saes = []
    for line in trained["runs"]:
        folder = kept / "saes" / line["config"]["name"] / "evals"
        one = {key: line[key] for key in ("name", "lr", "seed", "dead", "core")}
        for name, short in (("probing", probing), ("absorption", absorption)):
            path = folder / f"{name}.json"
            one[name] = short(json.loads(path.read_text())) if path.exists() else None
        saes.append(one)
    names = {line["config"]["name"].rsplit("-s", 1)[0]: line["name"] for line in trained["runs"]}
    origin = {key: trained[key] for key in ("versions", "git_commit", "device")}
    compared = json.loads((kept / "compare" / "compare.json").read_text())
    similar = {
        "across_seeds": [{"name": names[s["group"]], **s["mmcs"], "random": s["random"]} for s in compared["seeds"]],
        "across_members": {
            "names": [names[group] for group in compared["scores"]["all"]["groups"]],
            "mmcs": compared["scores"]["all"]["mmcs"],
        },
    }
    for name, content in (("saes", {"saes": saes}), ("similarity", similar)):
        (FOLDER / f"{name}.json").write_text(json.dumps(origin | content, indent=1) + "\n")


def probing(saved: Found) -> Found:
    """Means over classes, per dataset and over all datasets."""
    result = saved["result"]
    return {
        "summary": result["summary"],
        "accuracy": {d["name"]: {k: top_accuracy(d, k) for k in KS} for d in result["datasets"]},
        "texts": {d["name"]: d["texts"] for d in result["datasets"]},
        "settings": result["settings"],
        "seconds": saved["seconds"],
    }


def absorption(saved: Found) -> Found:
    """Means over letters, and the fraction of each letter."""
    result = saved["result"]
    means = {key: result[key] for key in ("words", "usable_letters", "fraction", "full", "splits", "main_f1")}
    letters = {letter["letter"]: letter["fraction"] for letter in result["letters"]}
    return means | {"letters": letters, "settings": result["settings"], "seconds": saved["seconds"]}


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def top_accuracy(measured: Found, k: str) -> float:
    value: float = measured["summary"]["top"][k]["accuracy"]["mean"]
    return value


def accuracy(sae: Found, k: str) -> float:
    return top_accuracy(sae["probing"], k)


def fraction(sae: Found, of: str = "fraction") -> float:
    value: float = sae["absorption"][of]["mean"]
    return value


def row(saes: list[Found]) -> list[str]:
    """One method, mean and range over its seeds."""
    probed = [sae for sae in saes if sae["probing"]]
    everything = [sae["probing"]["summary"]["all_latents"]["accuracy"]["mean"] for sae in probed]
    return [
        saes[0]["name"] + (f", {len(saes)} seeds" if len(saes) > 1 else ""),
        form([sae["core"]["normal"]["fvu"]["value"] for sae in saes], 3),
        *(form([accuracy(sae, k) for sae in probed], 3) for k in KS),
        form(everything, 3),
        *(form([fraction(sae, of) for sae in saes], 3) for of in ("fraction", "full", "main_f1")),
    ]


def paper_rows(saes: list[Found]) -> list[list[str]]:
    """The paper's table: the methods for each k, the best one bold."""
    chosen = [group for name in PAPER for group in by("name", saes) if group[0]["name"] == name]
    rows = []
    for k in KS:
        scores = [mean(accuracy(sae, k) for sae in group if sae["probing"]) for group in chosen]
        for group, score in zip(chosen, scores, strict=True):
            fvu = form([mean(sae["core"]["normal"]["fvu"]["value"] for sae in group)], 3)
            shown = f"{score:.4f}"
            rows.append([k, group[0]["name"], fvu, f"**{shown}**" if score == max(scores) else shown])
    return rows


def figure(saes: list[Found]) -> None:
    """Probing at k = 5 against absorption, with the range over seeds."""
    import plotly.graph_objects as go

    drawing = go.Figure()
    for group in by("name", saes):
        name = group[0]["name"]
        first = name.split(",")[0].split(" ")[0]
        xs, ys = [fraction(sae) for sae in group], [accuracy(sae, "5") for sae in group if sae["probing"]]
        symbol = "diamond" if "released" in name else "star" if "then" in name else "circle"
        spread = {"type": "data", "symmetric": False, "width": 0, "thickness": 1}
        drawing.add_scatter(
            x=[mean(xs)], y=[mean(ys)], name=name, mode="markers+text", text=[name], showlegend=False,
            textposition=BESIDE.get(name, "top center"),
            textfont={"size": 11, "color": COLORS[first]},
            error_x=spread | {"array": [max(xs) - mean(xs)], "arrayminus": [mean(xs) - min(xs)]},
            error_y=spread | {"array": [max(ys) - mean(ys)], "arrayminus": [mean(ys) - min(ys)]},
            marker={"color": COLORS[first], "symbol": symbol, "size": 9 + 4 * (symbol == "star")},
        )  # fmt: skip
    drawing.update_xaxes(title="absorption fraction (lower is better)", range=[0, 0.52])
    drawing.update_yaxes(title="probing accuracy, k = 5 (higher is better)")
    words = "SmolLM2 layer 12, d_sae = 65,536, K = 60; bars: range over seeds"
    drawing.update_layout(title=words, width=1100, height=640, template="plotly_white", font={"size": 14})
    drawing.write_image(DOCS / "images" / "smollm2-probing-absorption.png", scale=1.5)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "gather":
        gather(Path(sys.argv[2]))
    saes, similar = read("saes")["saes"], read("similarity")
    ks = [f"k = {k}" for k in KS]
    heads = ("", "FVU", *ks, "all latents", "absorption fraction", "full absorption", "F1 of main latents")
    table(heads, map(row, by("name", saes)))
    print()
    table(("k", "", "FVU", "accuracy"), paper_rows(saes))
    print()
    seeds = sorted(similar["across_seeds"], key=lambda line: -line["mean"])
    table(("across seeds", "MMCS", "chance"), ([s["name"], f"{s['mean']:.3f}", f"{s['random']:.3f}"] for s in seeds))
    print()
    names, rows = similar["across_members"]["names"], similar["across_members"]["mmcs"]
    first = rows[names.index("BatchTopK")]
    others = [(name, value) for name, value in zip(names, first, strict=True) if name != "BatchTopK"]
    table(("BatchTopK's latents in", "MMCS"), ([n, f"{v:.3f}"] for n, v in sorted(others, key=lambda pair: -pair[1])))
    figure(saes)


if __name__ == "__main__":
    main()
