"""`sampled-sae compare`: SAEs with each other, across seeds and across configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from sampled_sae.evals.similarity.members import SimilarityConfig


@dataclass(frozen=True)
class Compare:
    """Compare SAEs of the same activations: MMCS, one-to-one matching, features that only one of two has."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of SAEs, or of runs, or hf:OWNER/NAME[/FOLDER][@REVISION]; at least two SAEs."""
    out: Path
    """Folder for compare.json, pairs.csv and unique.csv."""
    similarity: Annotated[SimilarityConfig, tyro.conf.arg(name="")] = field(default_factory=SimilarityConfig)
    embedder: str | None = None
    """Model of sentence-transformers for the explanations: a hub name, a folder, or minilm. Default:
    all-mpnet-base-v2, as in the paper."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "SAEs and results": ("folders", "out", "device"),
        "Pairs": ("across", "reference", "seeds", "latents"),
        "Measures": ("matching", "exact_up_to", "candidates", "rounds", "tolerance", "threshold", "unique", "embedder"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/a --out runs/a/compare",
        "runs/a --seeds different --matching none --out runs/a/compare",
        "runs/a/saes/batchtopk-s0 hf:OWNER/NAME/layer-12 --out compare",
    )

    def run(self) -> None:
        from sampled_sae.api import compare
        from sampled_sae.reporting.comparison import print_comparison

        found = compare(self.folders, config=self.similarity, embedder=self.embedder, out=self.out, device=self.device)
        print_comparison(found.to_dict())
        print(f"\nAll numbers and histograms: {self.out / 'compare.json'}")
