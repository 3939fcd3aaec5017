"""Gemma Scope: params.npz with W_enc, b_enc, W_dec, b_dec, threshold; model, site and layer are in the folders' names.

gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71/params.npz

Gemma Scope 2: params.safetensors with the same tensors, matrices in lower case, and config.json.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sampled_sae.config import Config, require
from sampled_sae.formats import FORMATS, ReadOnly, StoredSAE
from sampled_sae.formats.tensors import (
    Archive,
    Shape,
    known_fields,
    metadata,
    npz_shapes,
    one_threshold,
    read_npz,
    read_object,
    read_safetensors,
    safetensors_shapes,
    wide,
)
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError

NPZ, SAFETENSORS, CONFIG = "params.npz", "params.safetensors", "config.json"
SITES = {"res": "hook_resid_post", "mlp": "hook_mlp_out", "att": "attn.hook_z"}
"""Hook points, as SAELens names them, by their name in the repository."""
SITES_2 = {
    "output": "hook_resid_post",
    "self_attn.o_proj.input": "attn.hook_z",
    "post_feedforward_layernorm.output": "hook_mlp_out",
}
"""The same by their name in config.json after the layer."""


class GemmaScope(ReadOnly):
    files = (NPZ,)

    def recognize(self, path: Path) -> bool:
        return (path / NPZ).is_file()

    def describe(self, path: Path) -> InferenceConfig:
        names = str(path.resolve())
        if "transcoder" in names:
            raise UserError(f"{path}: a transcoder; only SAEs can be loaded")
        d_in, d_sae = _matrix_shape(path / NPZ, npz_shapes(path / NPZ), "W_enc")
        return InferenceConfig(d_in, d_sae, apply_b_dec_to_input=False, metadata=_from_names(names))

    def load(self, path: Path) -> StoredSAE:
        cfg = self.describe(path)
        tensors = _tensors(read_npz(path / NPZ), cfg, lower=False)
        if cfg.metadata.get("hook_name") == "hook_embed":
            # Trained on embeddings as they are in the table; the model multiplies them by sqrt(d_in).
            tensors["W_enc"] = wide(tensors["W_enc"]) / math.sqrt(cfg.d_in)
            tensors["W_dec"] = wide(tensors["W_dec"]) * math.sqrt(cfg.d_in)
        return StoredSAE(cfg, tensors)


@dataclass(frozen=True, slots=True)
class Fields(Config):
    """Fields of config.json."""

    architecture: str = "jump_relu"
    type: str = "sae"
    model_name: str | None = None
    hf_hook_point_in: str | None = None
    hf_hook_point_out: str | None = None
    affine_connection: bool = False


class GemmaScope2(ReadOnly):
    files = (SAFETENSORS, CONFIG)

    def recognize(self, path: Path) -> bool:
        return (path / SAFETENSORS).is_file()

    def describe(self, path: Path) -> InferenceConfig:
        file, shapes = path / CONFIG, safetensors_shapes(path / SAFETENSORS)
        fields = known_fields(Fields, read_object(file), file) if file.exists() else Fields()
        if (kind := _other_kind(fields, shapes, str(path.resolve()))) is not None:
            raise UserError(f"{path}: a {kind}; only SAEs can be loaded")
        known = fields.architecture in ("jump_relu", "jumprelu")
        require(known, f"{file}: architecture", fields.architecture, "must be 'jump_relu'")
        d_in, d_sae = _matrix_shape(path / SAFETENSORS, shapes, "w_enc")
        return InferenceConfig(d_in, d_sae, apply_b_dec_to_input=False, metadata=_from_fields(fields))

    def load(self, path: Path) -> StoredSAE:
        cfg = self.describe(path)
        return StoredSAE(cfg, _tensors(read_safetensors(path / SAFETENSORS), cfg, lower=True))


FORMATS.register("gemma_scope", GemmaScope(), __name__)
FORMATS.register("gemma_scope_2", GemmaScope2(), __name__)


def _matrix_shape(path: Path, shapes: dict[str, Shape], name: str) -> Shape:
    """Shape of a matrix, of at least one row and column."""
    if name not in shapes or len(shapes[name]) != 2 or 0 in shapes[name]:
        raise UserError(f"{path}: {name} has shape {shapes.get(name)}: must be [d_in, d_sae]")
    return shapes[name]


def _tensors(weights: Archive, cfg: InferenceConfig, lower: bool) -> dict[str, Tensor]:
    d, m = cfg.d_in, cfg.d_sae
    shapes: dict[str, tuple[int, ...]] = {"W_enc": (d, m), "b_enc": (m,), "W_dec": (m, d), "b_dec": (d,)}
    tensors = {name: weights.take(name.lower() if lower else name, shape) for name, shape in shapes.items()}
    return tensors | {"threshold": one_threshold(weights.take("threshold", (m,), ()))}


def _from_names(names: str) -> dict[str, Any]:
    """Model and hook point, from the names of the folders."""
    repository = re.search(r"gemma-scope-(\d+b)-(pt|it)-(res|mlp|att)\b", names)
    layer = re.search(r"\blayer_(\d+)\b", names)
    if repository is None:
        return {}
    hook = f"blocks.{layer[1]}.{SITES[repository[3]]}" if layer else "hook_embed" if "embedding" in names else None
    model = f"google/gemma-2-{repository[1]}{'-it' * (repository[2] == 'it')}"
    return metadata(model_name=model, hook_name=hook, context_size=1024, prepend_bos=True)


def _other_kind(fields: Fields, shapes: dict[str, tuple[int, ...]], names: str) -> str | None:
    """What it is, if it is no SAE."""
    if "affine_skip_connection" in shapes or fields.affine_connection:
        return "skip transcoder"
    for kind in ("crosscoder", "transcoder", "clt"):
        if kind in fields.type or f"{kind}/" in names or f"{kind}_all/" in names:
            return kind.replace("clt", "cross-layer transcoder (CLT)")
    if fields.hf_hook_point_out not in (None, "", fields.hf_hook_point_in):
        return "transcoder"
    return "crosscoder" if any(len(shapes.get(name, ())) == 3 for name in ("w_enc", "w_dec")) else None


def _from_fields(fields: Fields) -> dict[str, Any]:
    """Model and hook point as they are named elsewhere."""
    model, hook = fields.model_name, re.fullmatch(r"model\.layers\.(\d+)\.(.+)", fields.hf_hook_point_in or "")
    if model is not None:
        model = (model if "/" in model else f"google/{model}").replace("gemma-v3", "gemma-3")
        model = model.removesuffix("-pt") if "270m" in model else model  # as the hub names it
    site = SITES_2.get(hook[2]) if hook else None
    return metadata(
        model_name=model,
        hook_name=f"blocks.{hook[1]}.{site}" if hook and site else None,
        hook_point=None if site else fields.hf_hook_point_in,
        context_size=1024,
        prepend_bos=True,
    )
