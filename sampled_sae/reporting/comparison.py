"""compare.json on the page and in a terminal; paper_tables.py makes the paper's tables of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sampled_sae.reporting.collect import dicts, part
from sampled_sae.reporting.figures import heatmap, plain, wrapped
from sampled_sae.reporting.pages import Figure, render
from sampled_sae.reporting.palette import INK
from sampled_sae.reporting.tables import console_of, drawn, fits, safe
from sampled_sae.utils.measures import Cell, Column, Stat, Table, Value, form, listed, number, shown

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.console import Console, RenderableType

Content = dict[str, Any]
# About tables of unique features of an older version.
OLD_UNIQUE = "made by an older version, which ignored latents without an explanation; run sampled-sae compare again"


# ---- tables of all outputs -----------------------------------------------------------------------------

Latents = Literal["live", "all"]
TITLES = {
    "live": "MMCS from rows to columns, live latents",
    "all": "MMCS from rows to columns, all latents, dead ones included",
}
SEED_COLUMNS = {
    "live": {"live": "MMCS, live", "live_random": "random"},
    "all": {"mmcs": "MMCS, all", "random": "random"},
}


def latents_of(content: Content) -> Latents:
    """Latents whose MMCS is shown: live ones, unless all were asked for or some pair does not know which are live."""
    pairs = dicts(content, "pairs")
    known = bool(pairs) and all(part(pair, "live") for pair in pairs)
    return "live" if known and part(content, "settings").get("latents") != "all" else "all"


def _seed_table(content: Content, cell: Callable[[Any], Cell]) -> Table:
    """A row per configuration of several seeds; `cell` makes a cell of a number or of a summary over pairs."""
    titles = {**SEED_COLUMNS[latents_of(content)], "matched": "one-to-one", "shared": "same feature"}
    columns = [Column("Configuration"), Column("Seeds"), *(Column(title, 3) for title in titles.values())]
    rows = [
        [str(row.get("group")), len(row.get("seeds") or ()), *(cell(row.get(name)) for name in titles)]
        for row in dicts(content, "seeds")
    ]
    return Table(columns, rows, title="Across seeds")


def _range(value: Any) -> Stat | None:
    """The mean over pairs with the smallest and the largest; a plain number has no range."""
    ends = value if isinstance(value, dict) else dict.fromkeys(Stat._fields, value)
    known = [end for name in Stat._fields if (end := number(ends.get(name))) is not None]
    return Stat(*known) if len(known) == 3 else None


def _deviation(value: Any) -> Value | None:
    """The mean over pairs with one standard deviation to each side."""
    both = value if isinstance(value, dict) else {"mean": value}
    mean, sd = number(both.get("mean")), number(both.get("sd"))
    if mean is None or sd is None:
        return None if mean is None else Value(mean, None, None)
    return Value(mean, mean - sd, mean + sd)


def _matrix(content: Content, name: str) -> tuple[list[str], list[list[float | None]]] | None:
    """Names of configurations and the MMCS from each (row) to each (column); None where there are not two."""
    table = part(content, "scores", name)
    names, values = table.get("groups"), table.get("mmcs")
    if not isinstance(names, list) or len(names) < 2 or not isinstance(values, list) or len(values) != len(names):
        return None
    if not all(isinstance(row, list) for row in values):
        return None
    return [shown(name) for name in names], [[number(value) for value in row] for row in values]


def matrix_caption(content: Content) -> str:
    """What the numbers on and off the diagonal of a matrix are."""
    across = "diagonal: across seeds"
    if part(content, "settings").get("seeds") != "same":
        return across
    seeds = {str(sae.get("name")): sae.get("seed") for sae in dicts(content, "saes")}
    both = [
        [seeds.get(str(p.get(name))) for name in "ab"] for p in dicts(content, "pairs") if p.get("kind") == "scores"
    ]
    same = sum(a is not None and a == b for a, b in both)
    if not same:
        return across
    many = "" if same == len(both) else f" ({same} of {len(both)} pairs)"
    return f"off-diagonal: same seed{many}, which share start values and so stay alike; {across}"


UNIQUE_COLUMNS = {
    "latent": Column("latent"),
    "explanation": Column("explanation", wide=True),
    "score": Column("score", 3),
    "match": Column("best match"),
    "match_explanation": Column("its explanation", wide=True),
    "overall": Column("overall", 3),
    "decoder": Column("decoder", 3),
    "text": Column("text", 3),
    "nearest": Column("nearest of all", 3, brief="nearest\nof all"),
}
TOP_COLUMNS = {"latent": Column("latent"), "score": Column("score", 3), "explanation": Column("explanation", wide=True)}


def feature_table(rows: Sequence[Content], columns: Mapping[str, Column], title: str, note: str = "") -> Table:
    return Table([*columns.values()], [[row.get(name) for name in columns] for row in rows], "", title, note)


def note_of(content: Content, item: Content, against: object) -> str | None:
    """How many explained latents are not unique, and why; None for a table of an older version."""
    equals, latents, threshold = item.get("equals"), item.get("latents"), part(content, "settings").get("threshold")
    if not isinstance(equals, int) or not isinstance(latents, int) or number(threshold) is None:
        return None
    why = f"a latent of {against}, explained or not, has a decoder cosine of {threshold:g} or more with it"
    if equals == latents:
        return f"None is unique: for each of the {latents}, {why}."
    return f"Left out as not unique: {equals} of {latents}, since for each {why}."


# ---- the page ------------------------------------------------------------------------------------------

ROW = 34  # pixels per row of a matrix


def compare_part(folder: Path, content: Content, count: int) -> str:
    """One compare.json as part of the report's page; ids contain `count`."""
    name = latents_of(content)
    found = _matrix(content, name)
    figures = (
        [Figure(f"compare-{count}-{name}", _heatmap(*found), TITLES[name], matrix_caption(content))] if found else []
    )
    unique, old = _unique_tables(content)
    top = [
        feature_table(rows, TOP_COLUMNS, str(sae.get("name")))
        for sae in dicts(content, "saes")
        if (rows := dicts(sae, "top_features"))
    ]
    skipped = Counter(f"{item.get('what')}: {item.get('reason')}" for item in dicts(content, "skipped"))
    shown_: dict[str, Any] = {
        "figures": figures,
        "unique": unique,
        "old": f"({old}): {OLD_UNIQUE}" if old else "",
        "top": top,
    }
    return render(
        "comparison.html", name=folder.name, count=count, seeds=_seed_table(content, _range), skipped=skipped, **shown_
    )


def _unique_tables(content: Content) -> tuple[list[Table], int]:
    """Features that only one of two SAEs has, and how many such tables are of an older version."""
    made, old = [], 0
    for item in (item for pair in dicts(content, "pairs") for item in dicts(pair, "unique")):
        rows, note = dicts(item, "table"), note_of(content, item, item.get("against"))
        if note is None:
            old += bool(rows)
        elif rows or item.get("equals"):
            made.append(feature_table(rows, UNIQUE_COLUMNS, f"{item.get('of')} against {item.get('against')}", note))
    return made, old


def _heatmap(names: Sequence[str], z: Sequence[Sequence[float | None]]) -> go.Figure:
    ticks = {"tickvals": list(range(len(names))), "ticktext": [*map(wrapped, names)], "showgrid": False}
    x, y = {**ticks, "side": "top", "tickangle": -45}, {**ticks, "range": [len(names) - 0.5, -0.5]}
    hover = [
        [f"{plain(a)} to {plain(b)}<br>{form(value, 2)}" for b, value in zip(names, row, strict=False)]
        for a, row in zip(names, z, strict=True)
    ]
    return heatmap(120 + ROW * len(names), x, y, z, hover, INK if len(names) <= 12 else None, 11)


# ---- the terminal --------------------------------------------------------------------------------------

PLAIN_WIDTH = 160  # columns, where the output is a file or a pipe
MOST_PAIRS = 20  # rows of the table of pairs; the files have all of them
BARS = "·▁▂▃▄▅▆▇█"  # zero is a dot: blanks at the ends of a cell would be lost
Part = tuple[str, "Sequence[RenderableType]"]


def print_comparison(content: Content, console: Console | None = None) -> None:
    """Seeds, configurations, pairs, unique and best explained features, and what was skipped."""
    console = console or console_of(PLAIN_WIDTH)
    for title, shown_ in _parts(content, console):
        console.print(safe(title, "bold"), *shown_, "", sep="\n")
    console.print(safe(_note(content)))
    skipped: dict[tuple[str, str], list[str]] = {}
    for item in dicts(content, "skipped"):
        skipped.setdefault((item["what"], item["reason"]), []).append(str(item["who"]))
    for (what, reason), names in skipped.items():
        console.print(safe(f"skipped, {what} ({len(names)}): {reason}: {listed(names, 4)}"))


def _parts(content: Content, console: Console) -> Iterator[Part]:
    seeds = _seed_table(content, _deviation)
    if seeds.rows:
        yield "Across seeds (mean over pairs, ± their standard deviation)", [drawn(seeds)]
    name = latents_of(content)
    if found := _matrix(content, name):
        columns = [Column("configuration"), *(Column(group, 3) for group in found[0])]
        rows = [[group, *values] for group, values in zip(*found, strict=True)]
        yield f"{TITLES[name]} ({matrix_caption(content)})", [drawn(Table(columns, rows))]
    yield _pairs(content, console)
    for item in _unique_to_groups(content):
        title = f"Unique to {item['of']} against {item['against']}"
        title = f"{title} ({item['latents']} and {item['others']} explained latents, best match {item['mean']:.3f})"
        table = feature_table(dicts(item, "table"), UNIQUE_COLUMNS, title)
        yield title, [*([drawn(table)] if table.rows else []), safe(note_of(content, item, item["against"]))]
    for sae in _first_of_each("group", (sae for sae in dicts(content, "saes") if sae.get("top_features"))):
        yield f"Top features of {sae['name']}", [drawn(feature_table(sae["top_features"], TOP_COLUMNS, ""))]


def _unique_to_groups(content: Content) -> list[Content]:
    """Of each configuration the unique features against the reference, in the first pair of the two."""
    pairs = (
        pair
        for pair in dicts(content, "pairs")
        if pair["kind"] == "scores" and pair["group_b"] == content["reference"] and pair["unique"]
    )
    own = [item for pair in _first_of_each("group_a", pairs) for item in pair["unique"] if item["of"] == pair["a"]]
    return [item for item in own if item["table"] or item["equals"]]


def _first_of_each(name: str, items: Iterable[Content]) -> list[Content]:
    first: dict[Any, Content] = {}
    for item in items:
        first.setdefault(item[name], item)
    return list(first.values())


PAIR_HEADS = ("a to b", "b to a", "live: a to b", "b to a ", "one-to-one", "same feature", "short of best by")
NARROW_HEADS = ("a to b", "b to a", "live:\na to b", "\nb to a", "one-to-\none", "same\nfeature", "short of\nbest by")


def _pairs(content: Content, console: Console) -> Part:
    """The first pairs; as the terminal gets narrower with shorter names, without histograms, with folded names."""
    pairs, edges = content["pairs"][:MOST_PAIRS], content["histogram_edges"]
    total = len(content["pairs"])
    title = "Pairs" if total <= MOST_PAIRS else f"Pairs (the first {MOST_PAIRS} of {total})"
    full = {pair[side]: pair[side] for pair in pairs for side in "ab"}
    short, before = short_names(list(full))
    renamed = f"{title}; names begin with {before}" if before else title
    for heading, names, bars in [(title, full, edges), (renamed, short, edges), (title, full, None)]:
        table = drawn(_pair_table(pairs, names, bars))
        if fits(table, console):
            return heading, [table]
    return renamed, [drawn(_pair_table(pairs, short, None))]


def short_names(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Names without the beginning that all of them share, up to the end of a word, and that beginning."""
    shared = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 (letters, not folders)
    before = shared[: max(shared.rfind(mark) for mark in "/-_. ") + 1]
    if before in names:
        before = ""
    return {name: name[len(before) :] for name in names}, before


def _pair_table(pairs: Sequence[Content], names: Mapping[str, str], edges: Sequence[float] | None) -> Table:
    """A row per pair; with histograms where their edges are given, else with narrow headers."""
    heads = [Column(head, 3) for head in (NARROW_HEADS if edges is None else PAIR_HEADS)]
    bars = [] if edges is None else [Column("cosines from 0 to 1")]
    rows: list[list[Cell]] = []
    for pair in pairs:
        ways = [number(part(pair, kind, way).get("mmcs")) for kind in ("all", "live") for way in ("a_to_b", "b_to_a")]
        matching = part(pair, "matching")
        gap = "-" if matching.get("gap") is None else f"{matching['gap']:.1g}"
        row = [names[pair["a"]], names[pair["b"]], *ways, matching.get("mean"), matching.get("shared"), gap]
        shape = [] if edges is None else [spark((matching or part(pair, "all", "a_to_b"))["histogram"], edges)]
        rows.append([*row, *shape])
    return Table([Column("a"), Column("b"), *heads, *bars], rows)


def spark(histogram: Sequence[int], edges: Sequence[float], bins: int = 20) -> str:
    """A histogram of cosines as a line of bars from 0 to 1; negative cosines count in the first."""
    counts = [0] * bins
    for count, low, high in zip(histogram, edges[:-1], edges[1:], strict=True):
        counts[min(bins - 1, max(0, int((low + high) / 2 * bins)))] += count
    top = max(*counts, 1)
    # A count above zero is always visible.
    return "".join(BARS[0 if not count else max(1, round(count / top * (len(BARS) - 1)))] for count in counts)


def _note(content: Content) -> str:
    threshold = content["settings"]["threshold"]
    lines = [
        "MMCS: mean over latents of the largest cosine with any latent of the other SAE; random: the same for random "
        "directions.",
        f"One-to-one: mean cosine of matched pairs; same feature: share of them at a cosine of {threshold:g} or more.",
    ]
    zeros = [f"{sae['name']} {sae['zero_rows']}" for sae in content["saes"] if sae["zero_rows"]]
    if zeros:
        lines.append(f"Latents without a direction (rows of zeros), left out: {', '.join(zeros)}.")
    return "\n".join(lines)
