"""`sampled-sae push`: SAEs to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro


@dataclass(frozen=True)
class Push:
    """Upload SAEs to the Hugging Face hub, as SAELens folders with model cards."""

    folder: tyro.conf.Positional[Path]
    """Folder of an SAE, or of a run: each of its SAEs then gets a folder of its name in the repository."""
    repo: tyro.conf.Positional[str]
    """Repository, OWNER/NAME; it is created if it does not exist."""
    subfolder: str | None = None
    """Folder in the repository. Default: the repository itself."""
    revision: str | None = None
    """Branch, which is created if it does not exist. Default: the main branch."""
    private: bool = False
    """Create a private repository; an existing one stays as it is."""
    license: str | None = None
    """License in the model card, by the hub's name for it, such as mit or apache-2.0."""
    replace_card: bool = False
    """Replace a README.md that is in the repository already."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/a/saes/batchtopk-s0 OWNER/NAME --subfolder layer-12 --license mit",
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
