"""`sampled-sae push`: SAEs to the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Push:
    """Upload SAEs to the Hugging Face hub, as SAELens folders with model cards."""

    folder: tyro.conf.Positional[Path]
    """Folder of an SAE, or of a run: each of its SAEs then gets a folder of its name in the repository."""
    repo: tyro.conf.Positional[str]
    """Repository, OWNER/NAME; it is created if it does not exist."""
    subfolder: str | None = None
    """Folder in the repository; the repository itself when unset."""
    revision: str | None = None
    """Branch, which is created if it does not exist; the main branch when unset."""
    private: bool = False
    """Create a private repository; an existing one stays as it is."""
    license: str | None = None
    """License in the model card, by the hub's name for it, such as mit or apache-2.0."""
    replace_card: bool = False
    """Replace a README.md that is in the repository already."""

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
