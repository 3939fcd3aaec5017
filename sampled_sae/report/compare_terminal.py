"""A comparison's tables in a terminal."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 160  # columns, where the output is a file or a pipe
MOST_PAIRS = 20
"""Rows of the table of pairs; the files have all of them."""
MOST_NAMES = 3
"""Names shown for each reason why something was skipped."""
BARS = "·▁▂▃▄▅▆▇█"
"""Nothing is a dot: blanks at the ends of a cell are lost, and with them the place of the others."""


def print_comparison(content: dict[str, Any], console: Console | None = None) -> None:
    """Seeds, configurations, pairs, unique and best explained features, and what was skipped."""
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    parts = [_seeds(content), *_matrices(content), _pairs(content), *_unique(content), *_top(content)]
    for title, table in filter(None, parts):
        console.print(Text(title, style="bold"), table, "", sep="\n")
    console.print(Text(_note(content)))
    for line in _skipped(content["skipped"]):
        console.print(Text(line))


Part = tuple[str, Table] | None


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
        found.append((f"{title} (diagonal: across seeds)", table))
    return found


def _pairs(content: dict[str, Any]) -> Part:
    pairs, edges = content["pairs"], content["histogram_edges"]
    columns = (
        "a",
        "b",
        "a to b",
        "b to a",
        "live: a to b",
        "b to a ",
        "one-to-one",
        "same feature",
        "short of best by",
    )
    table = _table(*columns, "cosines from 0 to 1")
    for pair in pairs[:MOST_PAIRS]:
        live, matching = pair["live"], pair["matching"]
        ways = [pair["all"]["a_to_b"]["mmcs"], pair["all"]["b_to_a"]["mmcs"]]
        ways += [None, None] if live is None else [live["a_to_b"]["mmcs"], live["b_to_a"]["mmcs"]]
        matched = [None] * 3 if matching is None else [matching["mean"], matching["shared"], matching["gap"]]
        shape = (matching or pair["all"]["a_to_b"])["histogram"]
        cells = [*map(_number, [*ways, *matched[:2]]), "-" if matched[2] is None else f"{matched[2]:.1g}"]
        table.add_row(_safe(pair["a"]), _safe(pair["b"]), *cells, spark(shape, edges))
    shown = "" if len(pairs) <= MOST_PAIRS else f" (the first {MOST_PAIRS} of {len(pairs)})"
    return f"Pairs{shown}", table


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
        if own is not None and own["table"]:
            found.append(_unique_table(own))
    return found


def _unique_table(own: dict[str, Any]) -> Part:
    wide = ("explanation", "its explanation")
    columns = ("latent", "explanation", "score", "best match", "its explanation", "overall", "decoder", "text")
    table = _table(*columns, wide=wide)
    for row in own["table"]:
        numbers = (_number(row["overall"]), _number(row["decoder"]), _number(row["text"]))
        score = _number(row["score"])
        texts = (_safe(row["explanation"]), score, str(row["match"]), _safe(row["match_explanation"]))
        table.add_row(str(row["latent"]), *texts, *numbers)
    title = f"Unique to {own['of']} against {own['against']}"
    return f"{title} ({own['latents']} and {own['others']} explained latents, best match {own['mean']:.3f})", table


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
