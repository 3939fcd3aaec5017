"""A comparison's tables in a terminal."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 160  # columns, where the output is a file or a pipe
MOST_PAIRS = 20
"""Rows of the table of pairs; the files have all of them."""
MOST_NAMES = 3
"""Names shown for each reason why something was skipped."""
BARS = "·▁▂▃▄▅▆▇█"
"""Nothing is a dot: blanks at the ends of a cell are lost, and with them the place of the others."""
OLD_UNIQUE = "made without a look at latents that nobody explained; run sampled-sae compare again"
"""About tables of unique features of an older version."""


def print_comparison(content: dict[str, Any], console: Console | None = None) -> None:
    """Seeds, configurations, pairs, unique and best explained features, and what was skipped."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    parts = [_seeds(content), *_matrices(content), _pairs(content, console), *_unique(content), *_top(content)]
    for title, table in filter(None, parts):
        console.print(Text(title, style="bold"), table, "", sep="\n")
    console.print(Text(_note(content)))
    for line in _skipped(content["skipped"]):
        console.print(Text(line))


Part = tuple[str, RenderableType] | None


def _table(*columns: str, wide: Sequence[str] = ()) -> Table:
    """Numbers to the right; the columns in `wide` hold text, which may take several lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(columns):
        text = number == 0 or title in wide
        table.add_column(title, justify="left" if text else "right", no_wrap=title not in wide, overflow="fold")
    return table


def _seeds(content: dict[str, Any]) -> Part:
    if not content["seeds"]:
        return None
    columns = ("configuration", "seeds", "MMCS", "random", "MMCS, live", "random, live", "one-to-one", "same feature")
    table = _table(*columns)
    for row in content["seeds"]:
        cells = [_spread(row["mmcs"]), _number(row["random"]), _spread(row["live"]), _number(row["live_random"])]
        table.add_row(
            _safe(row["group"]), str(len(row["seeds"])), *cells, _spread(row["matched"]), _spread(row["shared"])
        )
    return "Across seeds (mean over pairs, ± their standard deviation)", table


def _matrices(content: dict[str, Any]) -> list[Part]:
    titles = {"all": "MMCS from rows to columns, all latents", "live": "The same, live latents only"}
    found: list[Part] = []
    for name, title in titles.items():
        matrix = content["scores"].get(name)
        if matrix is None or len(matrix["groups"]) < 2:
            continue
        table = _table("configuration", *matrix["groups"])
        for label, row in zip(matrix["groups"], matrix["mmcs"], strict=True):
            table.add_row(_safe(label), *map(_number, row))
        found.append((f"{title} ({matrix_caption(content)})", table))
    return found


def matrix_caption(content: Mapping[str, Any]) -> str:
    """What the numbers on and off the diagonal of a compare.json's matrix are of."""
    settings, saes, pairs = (content.get(name) for name in ("settings", "saes", "pairs"))
    across = "diagonal: across seeds"
    if not isinstance(settings, dict) or settings.get("seeds") != "same":
        return across
    seeds = {str(sae.get("name")): sae.get("seed") for sae in _dicts(saes)}
    both = [[seeds.get(str(pair.get(name))) for name in "ab"] for pair in _dicts(pairs) if pair.get("kind") == "scores"]
    same = sum(a is not None and a == b for a, b in both)
    if not same:
        return across
    many = "" if same == len(both) else f" ({same} of {len(both)} pairs)"
    return f"off-diagonal: same seed{many}, which share start values and so stay alike; {across}"


def _dicts(found: Any) -> list[dict[str, Any]]:
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


PAIR_HEADS = ("a to b", "b to a", "live: a to b", "b to a ", "one-to-one", "same feature", "short of best by")
NARROW_HEADS = ("a to b", "b to a", "live:\na to b", "\nb to a", "one-to-\none", "same\nfeature", "short of\nbest by")


def _pairs(content: dict[str, Any], console: Console) -> Part:
    """The first pairs; as the terminal gets narrower with shorter names, without shapes, with names on many lines."""
    pairs, edges = content["pairs"][:MOST_PAIRS], content["histogram_edges"]
    total = len(content["pairs"])
    title = "Pairs" if total <= MOST_PAIRS else f"Pairs (the first {MOST_PAIRS} of {total})"
    full = {pair[side]: pair[side] for pair in pairs for side in "ab"}
    short, before = short_names(list(full))
    renamed = f"{title}; names begin with {before}" if before else title
    ways = [(title, full, True), (renamed, short, True), (title, full, False), (renamed, short, False)]
    for heading, names, shapes in ways:
        table = _pair_table(pairs, names, edges if shapes else None)
        if Measurement.get(console, console.options.update_width(100_000), table).maximum <= console.width:
            return heading, table
    return renamed, _pair_table(pairs, short, None, wide=("a", "b"))


def short_names(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Names without the beginning that all of them share, up to the end of a word, and that beginning."""
    low, high = (min(names), max(names)) if len(names) > 1 else ("", "")
    # What the first and the last by the alphabet share, all share.
    length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    shared = low[:length]
    before = shared[: max(shared.rfind(mark) for mark in "/-_. ") + 1]
    if any(name == before for name in names):
        before = ""
    return {name: name[len(before) :] for name in names}, before


def _pair_table(
    pairs: Sequence[dict[str, Any]],
    names: Mapping[str, str],
    edges: Sequence[float] | None,
    wide: Sequence[str] = (),
) -> Table:
    """One row a pair; with the shapes of histograms where their edges are given, else with narrow heads."""
    heads = NARROW_HEADS if edges is None else (*PAIR_HEADS, "cosines from 0 to 1")
    table = _table("a", "b", *heads, wide=wide)
    for pair in pairs:
        live, matching = pair["live"], pair["matching"]
        ways = [pair["all"]["a_to_b"]["mmcs"], pair["all"]["b_to_a"]["mmcs"]]
        ways += [None, None] if live is None else [live["a_to_b"]["mmcs"], live["b_to_a"]["mmcs"]]
        matched = [None] * 3 if matching is None else [matching["mean"], matching["shared"], matching["gap"]]
        cells = [*map(_number, [*ways, *matched[:2]]), "-" if matched[2] is None else f"{matched[2]:.1g}"]
        if edges is not None:
            cells.append(spark((matching or pair["all"]["a_to_b"])["histogram"], edges))
        table.add_row(*(_safe(names[pair[side]]) for side in "ab"), *cells)
    return table


def spark(histogram: Sequence[int], edges: Sequence[float], bins: int = 20) -> str:
    """A histogram of cosines as a line of bars from 0 to 1; what is below 0 counts in the first."""
    counts = [0] * bins
    for count, low, high in zip(histogram, edges[:-1], edges[1:], strict=True):
        counts[min(bins - 1, max(0, int((low + high) / 2 * bins)))] += count
    top = max(*counts, 1)
    # Whatever is there must be seen.
    return "".join(BARS[0 if not count else max(1, round(count / top * (len(BARS) - 1)))] for count in counts)


def _unique(content: dict[str, Any]) -> list[Part]:
    """What each configuration has and the reference lacks, in the first pair of the two."""
    seen: set[str] = set()
    found: list[Part] = []
    for pair in content["pairs"]:
        if pair["kind"] != "scores" or pair["group_b"] != content["reference"] or not pair["unique"]:
            continue
        if pair["group_a"] in seen:
            continue
        seen.add(pair["group_a"])
        own = next((item for item in pair["unique"] if item["of"] == pair["a"]), None)
        if own is not None and (own["table"] or own["equals"]):
            found.append(_unique_table(own, content["settings"]["threshold"]))
    return found


def _unique_table(own: dict[str, Any], threshold: float) -> Part:
    title = f"Unique to {own['of']} against {own['against']}"
    title = f"{title} ({own['latents']} and {own['others']} explained latents, best match {own['mean']:.3f})"
    left_out = unique_note(own["equals"], own["latents"], own["against"], threshold)
    if not own["table"]:
        return title, Text(left_out)
    columns = ("latent", "explanation", "score", "best match", "its explanation", "overall", "decoder", "text")
    table = _table(*columns, "nearest\nof all", wide=("explanation", "its explanation"))
    for row in own["table"]:
        numbers = [_number(row[name]) for name in ("overall", "decoder", "text", "nearest")]
        score = _number(row["score"])
        texts = (_safe(row["explanation"]), score, str(row["match"]), _safe(row["match_explanation"]))
        table.add_row(str(row["latent"]), *texts, *numbers)
    return title, Group(table, Text(left_out))


def unique_note(equals: int, latents: int, against: str, threshold: float) -> str:
    """How many explained latents are not unique, and why."""
    why = f"a latent of {against}, explained or not, has a decoder cosine of {threshold:g} or more with it"
    if equals == latents:
        return f"None is unique: for each of the {latents}, {why}."
    return f"Left out as not unique: {equals} of {latents}, since for each {why}."


def _top(content: dict[str, Any]) -> list[Part]:
    """The best explained latents of each configuration's first SAE that has some."""
    seen: set[str] = set()
    found: list[Part] = []
    for sae in content["saes"]:
        if sae["group"] in seen or not sae["top_features"]:
            continue
        seen.add(sae["group"])
        table = _table("rank", "score", "latent", "explanation", wide=("explanation",))
        for rank, row in enumerate(sae["top_features"], start=1):
            table.add_row(str(rank), _number(row["score"]), str(row["latent"]), _safe(row["explanation"]))
        found.append((f"Top features of {sae['name']}", table))
    return found


def _note(content: dict[str, Any]) -> str:
    threshold = content["settings"]["threshold"]
    lines = [
        "MMCS: mean over latents of the largest cosine with any latent of the other SAE; random: the same for random "
        "directions.",
        f"One-to-one: mean cosine of matched pairs; same feature: share of them at a cosine of {threshold:g} or more.",
    ]
    zeros = {sae["name"]: sae["zero_rows"] for sae in content["saes"] if sae["zero_rows"]}
    if zeros:
        named = ", ".join(f"{name} {count}" for name, count in zeros.items())
        lines.append(f"Latents without a direction (rows of zeros), left out: {named}.")
    return "\n".join(lines)


def _skipped(skipped: list[dict[str, str]]) -> list[str]:
    """How much was skipped of each kind, why, and some of the names."""
    lines = []
    for (what, reason), count in Counter((item["what"], item["reason"]) for item in skipped).items():
        names = [item["who"] for item in skipped if (item["what"], item["reason"]) == (what, reason)]
        more = f" and {count - MOST_NAMES} more" if count > MOST_NAMES else ""
        lines.append(f"skipped, {what} ({count}): {reason}: {', '.join(names[:MOST_NAMES])}{more}")
    return lines


def _safe(text: Any) -> Text:
    """Text without markup, and without characters that could steer the terminal."""
    return Text("".join(c if c.isprintable() else "?" for c in str(text)))


def _spread(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    return _number(value["mean"]) + ("" if value["sd"] is None else f" ± {value['sd']:.1g}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
