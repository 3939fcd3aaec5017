"""`sampled-sae compare`: SAEs with each other, across seeds and across configurations."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from sampled_sae.evals.similarity.members import SimilarityConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, write_json, write_text
from sampled_sae.utils.system import git_commit, versions


@dataclass(frozen=True)
class Compare:
    """Compare SAEs of the same activations: MMCS, one-to-one matching, features that only one of two has."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of SAEs, or of runs that hold some; two SAEs at least."""
    out: Path
    """Folder for compare.json, pairs.csv and unique.csv."""
    similarity: Annotated[SimilarityConfig, tyro.conf.arg(name="")] = field(default_factory=SimilarityConfig)
    embedder: str | None = None
    """Model of sentence-transformers for the explanations: a name on the hub, a folder, or minilm;
    all-mpnet-base-v2 by default, as in the paper."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""

    def run(self) -> None:
        import torch

        from sampled_sae.evals.similarity.evaluate import compare_saes
        from sampled_sae.evals.similarity.members import open_members
        from sampled_sae.models.embedder import DEFAULT, Embedder, open_embedder
        from sampled_sae.reporting.compare_terminal import print_comparison
        from sampled_sae.utils.progress import show
        from sampled_sae.utils.system import usable_device

        members = open_members(self.folders)
        place = usable_device(self.device)
        make_folder(self.out)
        bars: list[Any] = []

        def progress(done: int, total: int) -> None:
            if not bars:
                bars.append(show(total, what="comparing", unit="pairs"))
            bars[0].update(done)

        def embedder() -> Embedder:
            try:
                return open_embedder(self.embedder, place)
            except UserError as error:
                # The rest may take hours: whoever mistyped a name must see it at once.
                print(f"no unique features: {error}", file=sys.stderr)
                raise

        try:
            found = compare_saes(members, self.similarity, embedder, place, progress)
        except torch.cuda.OutOfMemoryError:
            raise UserError(f"at_once = {self.similarity.at_once}: out of GPU memory; lower it") from None
        finally:
            for bar in bars:
                bar.close()
        origin = {"versions": versions(), "git_commit": git_commit(), "embedder": self.embedder or DEFAULT}
        content = found.to_dict() | origin
        write_json(self.out / "compare.json", content)
        write_text(self.out / "pairs.csv", table(PAIR_COLUMNS, map(pair_row, content["pairs"])))
        write_text(self.out / "unique.csv", table(UNIQUE_COLUMNS, unique_rows(content["pairs"])))
        print_comparison(content)
        print(f"\nAll numbers, histograms too: {self.out / 'compare.json'}")


PAIR_COLUMNS = (
    *("kind", "a", "b", "group_a", "group_b", "mmcs_a_to_b", "mmcs_b_to_a", "mmcs_mean", "random_mean"),
    *("live_a_to_b", "live_b_to_a", "live_mean", "live_random_mean", "matched", "matched_shared", "matched_gap"),
)
UNIQUE_COLUMNS = (
    *("of", "against", "latent", "explanation", "score", "match", "match_explanation", "match_score"),
    *("overall", "decoder", "text", "nearest", "explained", "have_equal"),
)


def pair_row(pair: dict[str, Any]) -> list[Any]:
    """A pair of compare.json as a row of pairs.csv; empty where there is no number."""
    matching = pair["matching"] or {}
    names = [pair[name] for name in PAIR_COLUMNS[:5]]
    return [*names, *_ways(pair["all"]), *_ways(pair["live"]), *(matching.get(n) for n in ("mean", "shared", "gap"))]


def _ways(both: dict[str, Any] | None) -> list[Any]:
    return (
        [None] * 4 if both is None else [both["a_to_b"]["mmcs"], both["b_to_a"]["mmcs"], both["mean"], both["random"]]
    )


def unique_rows(pairs: Iterable[dict[str, Any]]) -> Iterable[list[Any]]:
    """The tables of unique features of compare.json as rows of unique.csv."""
    for pair in pairs:
        for item in pair["unique"]:
            for row in item["table"]:
                own = (row[name] for name in UNIQUE_COLUMNS[2:-2])
                yield [item["of"], item["against"], *own, item["latents"], item["equals"]]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The text of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
