"""`sampled-sae convert` and `sampled-sae push`: SAEs in other formats, and on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro

from sampled_sae.utils.errors import UserError


@dataclass(frozen=True)
class Convert:
    """Convert SAEs to another format. The source can be any format of SAELens, dictionary_learning, sparsify, Gemma
    Scope, Llama Scope, Qwen-Scope or an installed package."""

    source: tyro.conf.Positional[Path]
    """Folder or file of an SAE, hf:OWNER/NAME/FOLDER for one on the hub, or a folder with several."""
    out: tyro.conf.Positional[Path]
    """Folder of the new SAE; several SAEs are written to subfolders."""
    format: str = "saelens"
    """saelens, dictionary_learning, or a format of an installed package."""
    k: int | None = None
    """Active latents per token, for files that do not contain it (Qwen-Scope)."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "hf:google/gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82 saes/gemma-12",
        "runs/a saes/dictionary_learning --format dictionary_learning",
        "qwen-scope/layer12.sae.pt saes/qwen-12 --k 50",
    )

    def run(self) -> None:
        from sampled_sae.evals.results import find_saes, names_of
        from sampled_sae.formats import FORMATS
        from sampled_sae.formats.hub import local
        from sampled_sae.sae import SAE

        FORMATS.find(self.format)  # reports a wrong name first
        source = local(self.source)
        found = find_saes([source])
        if self.out.resolve().is_relative_to(source.resolve()):
            why = "is in the folder that is converted, where reports would show each SAE twice"
            raise UserError(f"out = {str(self.out)!r}: {why}; name another folder")
        single = found == [source] or source.is_file()
        for path, name in zip(found, names_of(found), strict=True):
            sae = SAE.load(path, k=self.k)
            print(sae.save(self.out if single else self.out / name, self.format), flush=True)


@dataclass(frozen=True)
class Push:
    """Upload SAEs to the Hugging Face hub, as SAELens folders with model cards."""

    folder: tyro.conf.Positional[Path]
    """Folder of an SAE or of a run; each SAE of a run is uploaded to a folder of its name."""
    repo: tyro.conf.Positional[str]
    """Repository, OWNER/NAME; it is created if it does not exist."""
    subfolder: str | None = None
    """Folder in the repository. Default: the repository itself."""
    revision: str | None = None
    """Branch, which is created if it does not exist. Default: the main branch."""
    private: bool = False
    """Create a private repository; an existing repository is not changed."""
    license: str | None = None
    """License in the model card, by the hub's name for it, such as mit or apache-2.0."""
    replace_card: bool = False
    """Replace an existing README.md in the repository."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/a/saes/topk-then-batch-at5-s0 OWNER/NAME --subfolder layer-12 --license mit",
        "runs/a OWNER/NAME --private",
        "runs/a OWNER/NAME --revision v2 --replace-card",
    )

    def run(self) -> None:
        from sampled_sae.api import push

        for address in push(
            self.folder,
            self.repo,
            self.subfolder,
            self.revision,
            private=self.private or None,
            license=self.license,
            card=self.replace_card or None,
        ):
            print(address)
