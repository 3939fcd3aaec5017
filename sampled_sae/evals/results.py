"""Files that evaluations leave in an SAE's folder: results, explanations, and how often each latent fires."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import make_folder, read_json, write_json, writing

NAME = "explanations.json"
FOLDER = "evals"
SAMPLE = 2**20
"""Bytes of each part of the weights that enter their fingerprint."""


def result_path(folder: Path, name: str) -> Path:
    """The file of an evaluation's result on the SAE in this folder."""
    return folder / FOLDER / f"{name}.json"


def write_result(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write a result, with how it was measured."""
    path = result_path(folder, name)
    make_folder(path.parent)
    write_json(path, dict(content))
    return path


def read_result(folder: Path, name: str) -> dict[str, Any] | None:
    """A result with how it was measured; None if there is none, or none that can be used."""
    path = result_path(folder, name)
    content = read_json(path) if path.exists() else None
    if not isinstance(content, dict) or not isinstance(content.get("result"), dict):
        return None
    asked = content.get("asked")
    content["asked"] = dict(asked) if isinstance(asked, dict) else {}
    if "interp_tokens" in content["asked"]:  # the name before 0.2
        content["asked"]["tokens"] = content["asked"].pop("interp_tokens")
    return content


def fingerprint(folder: Path) -> str:
    """A hash of parts of the weights' file, different for other weights."""
    path = folder / "sae_weights.safetensors"
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for start in (0, size // 3, 2 * size // 3, max(0, size - SAMPLE)):
            file.seek(start)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


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


FIRING = Path("evals") / "firing.safetensors"
"""Ours: `fired` [m], on how many tokens each latent fired, and `tokens` [1], how many were read."""
CORE = Path("evals") / "core.json"
"""Says how many latents are dead, not which: enough where it is none or all of them."""
SPARSITY = Path("sparsity.safetensors")
"""SAELens': `sparsity` [m], log10 of the density plus 1e-10."""


class Liveness(NamedTuple):
    """Which latents fire, as far as it is known."""

    mask: Tensor | None
    """[m] bool; none if it is not known."""
    source: str
    """The file that says so, or why it is not known."""


def save_firing(folder: Path, fired: Tensor, tokens: int) -> Path:
    """Keep on how many of the tokens each latent [m] fired, in the SAE's folder; written whole or not at all."""
    path = folder / FIRING
    make_folder(path.parent)
    content = save({"fired": fired.detach().cpu().long().contiguous(), "tokens": torch.tensor([tokens])})
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with writing(path):
            temporary.write_bytes(content)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load_live(folder: Path, m: int) -> Liveness:
    """What the folder says about its SAE's m latents; counts of our own come before SAELens' densities."""
    if (folder / FIRING).exists():
        return Liveness(_read(folder / FIRING, "fired", m) > 0, str(FIRING))
    if (folder / CORE).exists():
        dead = _dead(folder / CORE)
        if dead in (0, m):
            return Liveness(torch.full((m,), dead == 0), str(CORE))
    if (folder / SPARSITY).exists():
        # A latent that never fired has exactly -10 there, up to rounding.
        return Liveness(_read(folder / SPARSITY, "sparsity", m) > -9.99, str(SPARSITY))
    return Liveness(None, f"no {FIRING} there to say which latents fire")


def _dead(path: Path) -> int | None:
    """The number of dead latents that the core evaluation counted."""
    content = read_json(path)
    try:
        return int(content["result"]["density"]["dead"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not a result of the core evaluation; remove it or evaluate again") from None


def _read(path: Path, name: str, m: int) -> Tensor:
    try:
        values = load_file(path)[name]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path}: missing or damaged ({error})") from None
    if values.shape != (m,):
        raise UserError(f"{path}: {name} has shape {tuple(values.shape)}: must be {(m,)}, one for each latent")
    return values
