"""Gemma Scope: params.npz with W_enc, b_enc, W_dec, b_dec, threshold; model, site and layer are in the folders' names.

gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71/params.npz
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from sampled_sae.formats import FORMATS, ReadOnly, StoredSAE
from sampled_sae.formats.tensors import Shape, metadata, npz_shapes, one_threshold, read_npz, wide
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError

WEIGHTS = "params.npz"
SITES = {"res": "hook_resid_post", "mlp": "hook_mlp_out", "att": "attn.hook_z"}
"""Hook points, as SAELens names them, by their name in the repository."""


class GemmaScope(ReadOnly):
    files = (WEIGHTS,)

    def recognize(self, path: Path) -> bool:
        return (path / WEIGHTS).is_file()

    def describe(self, path: Path) -> InferenceConfig:
        names = str(path.resolve())
        if "transcoder" in names:
            raise UserError(f"{path}: a transcoder; only SAEs can be loaded")
        d_in, d_sae = matrix_shape(path / WEIGHTS, npz_shapes(path / WEIGHTS), "W_enc")
        return InferenceConfig(d_in, d_sae, apply_b_dec_to_input=False, metadata=_metadata(names))

    def load(self, path: Path) -> StoredSAE:
        cfg, weights = self.describe(path), read_npz(path / WEIGHTS)
        d, m = cfg.d_in, cfg.d_sae
        shapes: dict[str, tuple[int, ...]] = {"W_enc": (d, m), "b_enc": (m,), "W_dec": (m, d), "b_dec": (d,)}
        tensors = {name: weights.take(name, shape) for name, shape in shapes.items()}
        tensors["threshold"] = one_threshold(weights.take("threshold", (m,), ()))
        if cfg.metadata.get("hook_name") == "hook_embed":
            # Trained on embeddings as they are in the table; the model multiplies them by sqrt(d_in).
            tensors["W_enc"] = wide(tensors["W_enc"]) / math.sqrt(d)
            tensors["W_dec"] = wide(tensors["W_dec"]) * math.sqrt(d)
        return StoredSAE(cfg, tensors)


FORMATS.register("gemma_scope", GemmaScope(), __name__)


def matrix_shape(path: Path, shapes: dict[str, Shape], name: str) -> Shape:
    """Shape of a matrix, of at least one row and column."""
    if name not in shapes or len(shapes[name]) != 2 or 0 in shapes[name]:
        raise UserError(f"{path}: {name} has shape {shapes.get(name)}: must be [d_in, d_sae]")
    return shapes[name]


def _metadata(names: str) -> dict[str, Any]:
    """Model and hook point, from the names of the folders."""
    repository = re.search(r"gemma-scope-(\d+b)-(pt|it)-(res|mlp|att)\b", names)
    layer = re.search(r"\blayer_(\d+)\b", names)
    if repository is None:
        return {}
    hook = f"blocks.{layer[1]}.{SITES[repository[3]]}" if layer else "hook_embed" if "embedding" in names else None
    model = f"google/gemma-2-{repository[1]}{'-it' * (repository[2] == 'it')}"
    return metadata(model_name=model, hook_name=hook, context_size=1024, prepend_bos=True)
