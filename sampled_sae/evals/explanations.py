"""Explanations of an SAE's latents on disk, beside the SAE: written by automated interpretability, read by others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sampled_sae.errors import UserError
from sampled_sae.files import make_folder, read_json, write_json

NAME = "explanations.json"
FOLDER = "evals"


def explanations_path(folder: Path) -> Path:
    """Where the explanations of the SAE in this folder are."""
    return Path(folder) / FOLDER / NAME


def save_explanations(folder: Path, latents: Mapping[int, Mapping[str, Any]], **about: Any) -> Path:
    """Write what is known of each latent, at least its `explanation` and `score`; `about` says how it was made."""
    path = explanations_path(folder)
    make_folder(path.parent)
    plain = {str(latent): dict(latents[latent]) for latent in sorted(latents)}
    write_json(path, {**about, "latents": plain})
    return path


def load_explanations(folder: Path) -> dict[int, str]:
    """The explanation of each latent that has one."""
    path = explanations_path(folder)
    if not path.exists():
        raise UserError(f"{path}: there are no explanations yet; run the autointerp evaluation on this SAE first")
    content = read_json(path)
    latents = content.get("latents") if isinstance(content, dict) else None
    if not isinstance(latents, dict):
        raise UserError(f"{path}: must be an object with `latents`")
    found = {}
    for latent, entry in latents.items():
        text = entry.get("explanation") if isinstance(entry, dict) else entry
        if not latent.isdecimal() or not isinstance(text, str | None):
            raise UserError(f"{path}: latents[{latent!r}] must be a latent's number with an `explanation` that is text")
        if text:
            found[int(latent)] = text
    return found
