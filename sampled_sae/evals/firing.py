"""Which latents of a saved SAE fire at all: from what an evaluation left in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sampled_sae.errors import UserError
from sampled_sae.files import make_folder, read_json, writing

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
