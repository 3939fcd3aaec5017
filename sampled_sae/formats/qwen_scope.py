"""Qwen-Scope: one file layerN.sae.pt per layer; model and K are in the name of the repository.

SAE-Res-Qwen3-1.7B-Base-W32K-L0_50/layer12.sae.pt
"""

from __future__ import annotations

import re
from pathlib import Path

from sampled_sae.config import require
from sampled_sae.formats import FORMATS, ReadOnly, StoredSAE
from sampled_sae.formats.tensors import Archive, metadata, read_pickle
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError

FILE = re.compile(r"layer(\d+)\.sae\.pt")
REPOSITORY = re.compile(r"SAE-Res-([^/]+?)-W(\d+)K-L0_(\d+)")


class QwenScope(ReadOnly):
    files: tuple[str, ...] = ()  # the path is the file itself

    def recognize(self, path: Path) -> bool:
        return FILE.fullmatch(path.name) is not None and path.is_file()

    def describe(self, path: Path) -> InferenceConfig:
        return _config(path, read_pickle(path, mapped=True), None)

    def load(self, path: Path) -> StoredSAE:
        return _load(path, None)

    def load_with(self, path: Path, k: int) -> StoredSAE:
        return _load(path, k)


FORMATS.register("qwen_scope", QwenScope(), __name__)


def _load(path: Path, k: int | None) -> StoredSAE:
    weights = read_pickle(path)
    cfg = _config(path, weights, k)
    d, m = cfg.d_in, cfg.d_sae
    tensors = {
        "W_enc": weights.take("W_enc", (m, d)).T,
        "b_enc": weights.take("b_enc", (m,)),
        "W_dec": weights.take("W_dec", (d, m)).T,
        "b_dec": weights.take("b_dec", (d,)),
    }
    return StoredSAE(cfg, tensors)


def _config(path: Path, weights: Archive, k: int | None) -> InferenceConfig:
    """TopK of the pre-activations, without subtracting b_dec; `k`, or else the one in the repository's name."""
    named = REPOSITORY.search(str(path.resolve()))
    if k is None and named is None:
        how = "SAE.load(path, k=50), sampled-sae convert --k 50, or keep the repository's name, ...-L0_50"
        raise UserError(f"{path}: does not name the number of active latents; {how}")
    shape = tuple(getattr(weights.tensors.get("W_enc"), "shape", ()))
    if len(shape) != 2 or 0 in shape:
        raise UserError(f"{path}: W_enc has shape {shape or None}: must be [d_sae, d_in]")
    found, layer = k if k is not None else int(named[3]) if named else 0, FILE.fullmatch(path.name)
    require(found >= 1, f"{path}: k", found, "must be at least 1")
    about = metadata(
        model_name=f"Qwen/{named[1]}" if named else None,
        hook_name=f"blocks.{layer[1]}.hook_resid_post" if layer else None,
        context_size=1024,
    )
    return InferenceConfig(shape[1], shape[0], "topk", found, apply_b_dec_to_input=False, metadata=about)
