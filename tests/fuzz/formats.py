"""SAEs of other programs: undamaged ones, and what reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import sampled_sae as ss
from sampled_sae.evals.similarity.members import open_member
from sampled_sae.formats import describe, saes_in
from tests.formats.foreign import FOREIGN, weights
from tests.fuzz.mutate import Damage, binary_damage, json_damage, odd_arrays, other_archive

D_IN, D_SAE = 16, 48
FILES = {
    "saelens checkpoint": ("cfg.json", "sae_weights.safetensors", "activation_scaler.json"),
    "saelens checkpoint, whitened": ("cfg.json", "activation_whitening.safetensors"),
    "saelens v5 finetuned": ("cfg.json", "sae_weights.safetensors"),
    "dictionary_learning matryoshka": ("config.json", "ae.pt"),
    "dictionary_learning interrupted": ("config.json", "ae.pt"),
    "sparsify groupmax": ("layers.1/cfg.json", "layers.1/sae.safetensors", "config.json"),
    "gemma_scope": ("gemma-scope-2b-pt-res/layer_1/width_16k/average_l0_71/params.npz",),
    "gemma_scope_2": tuple(
        f"resid_post_all/layer_1_width_16k_l0_small/{name}" for name in ("config.json", "params.safetensors")
    ),
    "llama_scope": tuple(
        f"Llama3_1-8B-Base-L1R-8x/{name}" for name in ("hyperparams.json", "checkpoints/final.safetensors")
    ),
    "qwen_scope": ("SAE-Res-Qwen3-1.7B-Base-W32K-L0_4/layer1.sae.pt",),
}
"""Files that are damaged, by the name of the SAE in `FOREIGN`."""


def build_formats(root: Path) -> None:
    for name in FILES:
        FOREIGN[name](root / folder_of(name), weights(D_IN, D_SAE))


def folder_of(name: str) -> str:
    return f"formats/{name.replace(' ', '-')}"


def damage(content: bytes, draw: Any) -> Damage:
    """Of weights: bytes, headers of safetensors, arrays and archives of other kinds."""
    if draw.random() < 0.1:
        new, where = odd_arrays(draw)
        return Damage(new, "bytes", where)
    if draw.random() < 0.1:
        return Damage(other_archive(draw), "bytes", "another archive")
    return binary_damage(content, draw)


def damage_of(name: str) -> Any:
    return json_damage if name.endswith(".json") else damage


def read(folder: Path) -> Any:
    found = saes_in(folder)
    if len(found) != 1:
        raise ss.UserError(f"{folder}: {len(found)} SAEs")
    sae = ss.SAE.load(found[0])
    # The prefixes may be in the file of the weights alone, which a description does not read.
    assert replace(describe(found[0]), prefixes=sae.cfg.prefixes) == sae.cfg
    x = torch.ones(3, sae.d_in)
    member = open_member(found[0])
    return sae.cfg, sae.state_dict(), sae.encode(x), sae(x), (member.latents, member.width)
