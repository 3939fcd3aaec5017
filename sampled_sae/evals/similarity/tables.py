"""A comparison as files: compare.json with all numbers and histograms, pairs.csv, unique.csv."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sampled_sae.config import write_file
from sampled_sae.utils.files import write_text
from sampled_sae.utils.measures import csv_text
from sampled_sae.utils.system import git_commit, versions

PAIR_COLUMNS = (
    *("kind", "a", "b", "group_a", "group_b", "mmcs_a_to_b", "mmcs_b_to_a", "mmcs_mean", "random_mean"),
    *("live_a_to_b", "live_b_to_a", "live_mean", "live_random_mean", "matched", "matched_shared", "matched_gap"),
)
UNIQUE_COLUMNS = (
    *("of", "against", "latent", "explanation", "score", "match", "match_explanation", "match_score"),
    *("overall", "decoder", "text", "nearest", "explained", "have_equal"),
)


def write_comparison(content: dict[str, Any], embedder: str, out: Path) -> None:
    """Write a comparison as compare.json, pairs.csv and unique.csv."""
    origin = {"versions": versions(), "git_commit": git_commit(), "embedder": embedder}
    write_file(out / "compare.json", "comparison", content | origin)
    write_text(out / "pairs.csv", csv_text(PAIR_COLUMNS, map(_pair_row, content["pairs"])))
    write_text(out / "unique.csv", csv_text(UNIQUE_COLUMNS, _unique_rows(content["pairs"])))


def _pair_row(pair: dict[str, Any]) -> list[Any]:
    """A pair as a row of pairs.csv; empty where there is no number."""
    matching = pair["matching"] or {}
    names = [pair[name] for name in PAIR_COLUMNS[:5]]
    return [*names, *_ways(pair["all"]), *_ways(pair["live"]), *(matching.get(n) for n in ("mean", "shared", "gap"))]


def _ways(both: dict[str, Any] | None) -> list[Any]:
    if both is None:
        return [None] * 4
    return [both["a_to_b"]["mmcs"], both["b_to_a"]["mmcs"], both["mean"], both["random"]]


def _unique_rows(pairs: Iterable[dict[str, Any]]) -> Iterable[list[Any]]:
    """The tables of unique features as rows of unique.csv."""
    for pair in pairs:
        for item in pair["unique"]:
            for row in item["table"]:
                own = (row[name] for name in UNIQUE_COLUMNS[2:-2])
                yield [item["of"], item["against"], *own, item["latents"], item["equals"]]
