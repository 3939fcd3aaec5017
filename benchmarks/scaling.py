"""Project the throughput on several H200s from measured parts: `python benchmarks/scaling.py` rewrites docs/scaling.md.

Inputs: docs/scaling/ranks.jsonl (lines of benchmarks/ranks.py on one H200), and the figures of docs/speed and
docs/language-models. Where a part is not measured, it is estimated from one GPU and marked. `--check` writes nothing
and fails if the page is out of date; `--picture` also draws docs/images/scaling.png (needs plotly and kaleido).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sampled_sae.reporting import palette

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "scaling.md"
GPUS = (1, 2, 4, 8)
BATCH, D_IN, TOKENS, SAES = 4096, 768, 25_000_000, 49  # of the paper's sweep
AUXK_FROM = 10_000_000  # tokens
SIZES = (65_536, 2**20, 2**22)
COUNTERS = 2**15 * 4  # bytes of the counts by value


class Link(NamedTuple):
    """What connects the GPUs."""

    name: str
    bandwidth: float
    """Bytes per second that each GPU sends and receives in a collective."""
    latency: float
    """Seconds of one collective of no size."""


NVLINK, ETHERNET = LINKS = (Link("NVLink 4", 360e9, 20e-6), Link("400 Gb/s Ethernet", 45e9, 50e-6))


class Exchange(NamedTuple):
    """Collectives of one kind in one step."""

    kind: str
    bytes: float
    messages: float = 1

    def seconds(self, ranks: int, link: Link) -> float:
        """Time of a ring: each rank sends and receives the same number of bytes."""
        share = {"all_reduce": 2 * (ranks - 1) / ranks, "ordered_sum": 2 * (ranks - 1) / ranks, "all_gather": ranks - 1}
        rounds = 2 if self.kind == "ordered_sum" else 1
        sent = share[self.kind] * self.bytes / link.bandwidth
        return 0.0 if ranks == 1 else sent + rounds * self.messages * link.latency


class Step(NamedTuple):
    """One step with the latents divided over ranks."""

    d_sae: int
    ranks: int
    work: float  # seconds of a rank's own work
    measured: bool
    exchanges: tuple[Exchange, ...]
    gib: float | None = None

    def seconds(self, link: Link) -> float:
        return self.work + sum(each.seconds(self.ranks, link) for each in self.exchanges)

    def bytes_sent(self) -> float:
        """Bytes that a rank sends per step."""
        return sum(each.seconds(self.ranks, Link("", 1.0, 0.0)) for each in self.exchanges)


def figures(name: str) -> Any:
    return json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def lines() -> tuple[dict[str, Any], ...]:
    """The lines of benchmarks/ranks.py on a GPU: BatchTopK at this page's shape."""
    path = DOCS / "scaling" / "ranks.jsonl"
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    shape = {"batch": BATCH, "d_in": D_IN, "method": "BatchTopK", "path": "fast"}
    return tuple(line for line in found if all(line[name] == value for name, value in shape.items()))


def measured(part: str, d_sae: int, ranks: int) -> dict[str, Any] | None:
    """The newest line of a part, without a real exchange between processes that share the GPU."""
    same = [x for x in lines() if (x["part"], x["d_sae"], x["shards"]) == (part, d_sae, ranks)]
    return next((line for line in reversed(same) if line["exchange"] != "gloo"), None)


def one_gpu(d_sae: float) -> tuple[float, bool]:
    """Seconds of a BatchTopK step on one GPU, and whether that size was measured; if not, linear from the nearest."""
    known = {p["m"]: p["ms"] / 1e3 for p in figures("speed/growth")["points"] if (p["axis"], p["kind"]) == GROWTH}
    known |= {line["d_sae"]: line["ms"] / 1e3 for line in lines() if line["part"] == "step" and line["shards"] == 1}
    if d_sae in known:
        return known[int(d_sae)], True
    sizes = sorted(known)
    low = max((size for size in sizes[:-1] if size <= d_sae), default=sizes[0])
    high = sizes[sizes.index(low) + 1]
    return known[low] + (known[high] - known[low]) * (d_sae - low) / (high - low), False


GROWTH = ("m", "BatchTopK")


def baseline() -> tuple[int, float]:
    """The largest SAE that was measured on one GPU: its latents, and seconds per step."""
    sizes = [line["d_sae"] for line in lines() if line["part"] == "step" and line["shards"] == 1]
    d_sae = max(sizes, default=max(p["m"] for p in figures("speed/growth")["points"] if p["axis"] == "m"))
    return d_sae, one_gpu(d_sae)[0]


def step(d_sae: int, ranks: int) -> Step:
    """A step of one SAE whose latents are divided over so many ranks."""
    line = measured("step", d_sae, ranks)
    work, known = (line["ms"] / 1e3, True) if line else (one_gpu(d_sae / ranks)[0], ranks == 1 and one_gpu(d_sae)[1])
    batch = Exchange("all_gather", BATCH * D_IN * 2 / ranks)  # each rank collects its share of the activations
    found = [measured(kind, d_sae, ranks) for kind in ("all_reduce", "all_gather", "ordered_sum")]
    if all(found):
        own = [Exchange(x["part"], x["bytes"], x["messages"]) for x in found if x is not None]
    else:  # counts by value; ties per token; partial reconstructions and the gradient of b_dec in float32
        sums = Exchange("ordered_sum", (BATCH + 1) * D_IN * 4, 2)
        own = [Exchange("all_reduce", COUNTERS, 2), Exchange("all_gather", BATCH * 4, 2), sums]
    return Step(d_sae, ranks, work, known, (batch, *own) if ranks > 1 else (), line and line.get("gib"))


def efficiency(one: Step, link: Link) -> float:
    """Latents times tokens per second, relative to as many GPUs at the baseline."""
    d_sae, seconds = baseline()
    return (one.d_sae / one.seconds(link)) / (one.ranks * d_sae / seconds)


# ---- SAEs over ranks --------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """The paper's 49 SAEs on so many GPUs, in seconds."""

    ranks: int
    saes: int  # of the rank with the most
    steps: float
    auxk: float
    reading: float
    exchange: float
    start: float

    @property
    def total(self) -> float:
        return self.steps + self.reading + self.exchange + self.start


def sweep(ranks: int, link: Link) -> Sweep:
    """Whole SAEs divided over ranks; each rank collects its share of the activations and receives all of them."""
    steps, saes = math.ceil(TOKENS / BATCH), math.ceil(SAES / ranks)
    runs = figures("speed/auxk")["current"]
    extra = (median(runs["BatchTopK, AuxK with a tenth dead"]) - median(runs["without"])) / 1e3
    once = figures("language-models/whole_command")["warm caches"]
    start = sum(once["seconds"][name] for name in ("import", "load the model", "tokenize and hold out"))
    kind = "harvest, compiled" if once["compiled"] else "harvest"  # compiling is part of the start
    return Sweep(
        ranks,
        saes,
        steps * saes * figures("speed/sweep")["ms_a_step_of_one"] / 1e3,
        (steps - AUXK_FROM // BATCH) * saes * extra,
        TOKENS / (ranks * figures("language-models/harvest")["figures"][kind]),
        steps * Exchange("all_gather", BATCH * D_IN * 2 / ranks).seconds(ranks, link),
        start + figures("speed/sweep")["setup_seconds"] * saes / SAES,
    )


# ---- the page ---------------------------------------------------------------------------------------


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    header = list(header)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows))


def latents_table() -> str:
    rows = []
    for d_sae in SIZES:
        for ranks in GPUS[1:]:
            one = step(d_sae, ranks)
            shown = f"{one.work * 1e3:.2f}" + ("" if one.measured else " *")
            columns = [f"{one.seconds(link) * 1e3:.2f} ({efficiency(one, link):.0%})" for link in LINKS]
            rate = f"{BATCH / one.seconds(NVLINK) / 1e3:,.0f}"
            rows.append([f"{d_sae:,}", ranks, shown, f"{one.bytes_sent() / 1e6:.1f}", *columns, rate])
    names = [f"{link.name}, ms" for link in LINKS]
    return table(["d_sae", "GPUs", "own work, ms", "sent per GPU, MB", *names, "1,000 tokens/s, NVLink"], rows)


class Memory(NamedTuple):
    """Peak memory of a GPU: a fixed part, and a part that divides with the latents."""

    fixed: float  # GiB
    each: float  # GiB per latent
    """Of the latents that this GPU has."""

    def gib(self, latents: float) -> float:
        return self.fixed + self.each * latents


def fitted(divided: bool) -> Memory:
    """The two parts, for a rank of several or for one GPU alone: least squares of the relative error."""
    steps = {(line["d_sae"], line["shards"]) for line in lines() if line["part"] == "step"}
    found = [step(*size) for size in steps if (size[1] > 1) is divided]
    points = [(one.d_sae / one.ranks, one.gib) for one in found if one.gib is not None]
    # gib = fixed + each * latents, divided by gib: 1 = fixed * u + each * v.
    uu, uv, vv, u, v = (
        math.fsum(f(1 / gib, latents / gib) for latents, gib in points)
        for f in (lambda u, v: u * u, lambda u, v: u * v, lambda u, v: v * v, lambda u, v: u, lambda u, v: v)
    )
    under = uu * vv - uv * uv
    return Memory((u * vv - v * uv) / under, (v * uu - u * uv) / under)


def memory_table() -> str:
    rank, alone, rows, off = fitted(True), fitted(False), [], []
    for d_sae in SIZES:
        whole = step(d_sae, 1).gib
        for one in (step(d_sae, ranks) for ranks in GPUS):
            if one.gib is None:
                continue
            latents, share = one.d_sae / one.ranks, "" if whole is None else f"{whole / one.ranks:.1f}"
            kind = rank if one.ranks > 1 else alone
            off.append(abs(kind.gib(latents) / one.gib - 1))
            parts = [f"{kind.fixed:.1f}", f"{kind.each * latents:.1f}"]
            rows.append([f"{d_sae:,}", one.ranks, f"{one.gib:.1f}", *parts, share])
    kb = [f"{kind.each * 2**30 / 1e3:.1f} kB" for kind in (rank, alone)]
    note = (
        f"Fixed and divided part are a fit to the measured peaks, off by at most {max(off):.0%}. One of several ranks "
        f"has {rank.fixed:.2f} GiB and {kb[0]} for each of its own latents, one GPU alone {alone.fixed:.2f} GiB and "
        f"{kb[1]}."
    )
    head = ["d_sae", "GPUs", "GiB per GPU, measured", "fixed", "divided by N", "1 / N of one GPU"]
    return f"{table(head, rows)}\n\n{note}"


def sweep_table() -> str:
    rows = []
    for ranks in GPUS:
        one, other = sweep(ranks, NVLINK), sweep(ranks, ETHERNET)
        parts = [f"{value:.0f}" for value in (one.steps, one.reading, one.start)]
        exchange = f"{one.exchange:.1f} / {other.exchange:.1f}"
        totals = [f"{(each.total + auxk * each.auxk) / 60:.1f}" for each, auxk in ((one, 0), (other, 0), (one, 1))]
        rows.append([ranks, one.saes, *parts, exchange, *totals])
    head = ["GPUs", "SAEs per GPU", "steps, s", "model, s", "start, s", "exchange, s: NVLink / Ethernet"]
    return table([*head, "total, min: NVLink", "Ethernet", "NVLink, with AuxK"], rows)


def targets() -> str:
    whole = [sweep(8, link) for link in LINKS]
    one = step(2**22, 8)
    d_sae, seconds = baseline()
    rows = [
        ["49 SAEs on 8 GPUs", "under 120 s", *(f"{each.total:.0f} s" for each in whole)],
        ["the same, AuxK with a tenth dead", "", *(f"{each.total + each.auxk:.0f} s" for each in whole)],
        ["4M latents on 8 GPUs, efficiency", "85%", *(f"{efficiency(one, link):.0%}" for link in LINKS)],
    ]
    source = (
        "was measured" if one.measured else "was **not measured yet**; it is estimated from one GPU at 524,288 latents"
    )
    note = f"A rank's own work for 4M latents {source}. The baseline is one GPU with {d_sae:,} latents"
    shown = table(["", "target", *(link.name for link in LINKS)], rows)
    return f"{shown}\n\n{note}, {seconds * 1e3:.1f} ms per step."


def equal_table() -> str:
    """Trainings on one process and on two ranks that share a GPU: held-out FVU, and kept values from the same state."""
    text = (DOCS / "scaling" / "equal.jsonl").read_text(encoding="utf-8")
    found, rows = [json.loads(line) for line in text.splitlines()], []
    for sae, title in (("batchtopk", "BatchTopK"), ("topk", "TopK"), ("pool l2", "Sampled-SAE, `l2`, l = 5")):
        own = [line for line in found if line.get("sae") == sae and "run" in line]
        ends = {line["run"]: f"{line['heldout_fvu']:.5f}" for line in own if "heldout_fvu" in line}
        steps = {
            run: [line["differing"] for line in own if line["run"] == run] for run in ("lockstep", "lockstep perturbed")
        }
        counts = [f"{min(each)} to {max(each)}" if max(each) else "0" for each in steps.values()]
        rows.append([title, *counts, *(ends[run] for run in ("one process", "ranks", "perturbed", "seed"))])
    head = ["", "kept values that differ, two ranks", "activations changed by 1e-6", "FVU, one process", "two ranks"]
    return table([*head, "activations changed by 1e-6", "another seed"], rows)


def links_table() -> str:
    rows = [[link.name, f"{link.bandwidth / 1e9:.0f} GB/s", f"{link.latency * 1e6:.0f} us"] for link in LINKS]
    return table(["link", "usable per GPU and direction", "latency per collective"], rows)


TABLES = {
    "targets": targets,
    "links": links_table,
    "saes": sweep_table,
    "latents": latents_table,
    "memory": memory_table,
    "equal": equal_table,
}


def filled(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The page with its tables made anew."""
    for name, make in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        assert begin in page and end in page, name
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return page


def draw(path: Path) -> None:
    """Two panels: the time of the paper's sweep, and the throughput of one large SAE, against the number of GPUs."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ("49 SAEs of 65,536 latents, 25M tokens (projection)", "One SAE of 4M latents (projection)")
    figure: go.Figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    for link, color in zip(LINKS, (palette.BLUE, palette.VERMILION), strict=True):
        shared = {"name": link.name, "legendgroup": link.name, "line": {"color": color}, "mode": "lines+markers"}
        figure.add_scatter(x=GPUS, y=[sweep(n, link).total / 60 for n in GPUS], row=1, col=1, **shared)
        rates = [n * efficiency(step(2**22, n), link) for n in GPUS]
        figure.add_scatter(x=GPUS, y=rates, row=1, col=2, showlegend=False, **shared)
    dotted = {"mode": "lines", "line": {"color": palette.GREY, "dash": "dot"}}
    figure.add_scatter(x=GPUS, y=[2] * len(GPUS), row=1, col=1, name="target", **dotted)
    figure.add_scatter(x=GPUS, y=[0.85 * n for n in GPUS], row=1, col=2, showlegend=False, **dotted)
    figure.update_xaxes(title="H200s", tickvals=GPUS)
    figure.update_yaxes(title="minutes", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="throughput, one GPU = 1", rangemode="tozero", row=1, col=2)
    legend = {"orientation": "h", "y": -0.18}
    figure.update_layout(template="plotly_white", font={"size": 14}, width=1100, height=420, legend=legend)
    figure.update_layout(margin={"t": 40})
    figure.write_image(path, scale=1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--picture", action="store_true")
    asked = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if asked.check:
        sys.exit("docs/scaling.md is out of date: python benchmarks/scaling.py" if new != old else 0)
    PAGE.write_text(new, encoding="utf-8")
    if asked.picture:
        draw(DOCS / "images" / "scaling.png")


if __name__ == "__main__":
    main()
