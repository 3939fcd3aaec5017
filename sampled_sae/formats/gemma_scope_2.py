"""Gemma Scope 2: params.safetensors with w_enc, b_enc, w_dec, b_dec, threshold, and config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sampled_sae.config import Config, require
from sampled_sae.formats import FORMATS, ReadOnly, StoredSAE
from sampled_sae.formats.gemma_scope import matrix_shape
from sampled_sae.formats.tensors import (
    known_fields,
    metadata,
    one_threshold,
    read_object,
    read_safetensors,
    safetensors_shapes,
)
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError

WEIGHTS, CONFIG = "params.safetensors", "config.json"
SITES = {
    "output": "hook_resid_post",
    "self_attn.o_proj.input": "attn.hook_z",
    "post_feedforward_layernorm.output": "hook_mlp_out",
}
"""Hook points, as SAELens names them, by their name in config.json after the layer."""


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
    files = (WEIGHTS, CONFIG)

    def recognize(self, path: Path) -> bool:
        return (path / WEIGHTS).is_file()

    def describe(self, path: Path) -> InferenceConfig:
        file, shapes = path / CONFIG, safetensors_shapes(path / WEIGHTS)
        fields = known_fields(Fields, read_object(file), file) if file.exists() else Fields()
        if (kind := _other_kind(fields, shapes, str(path.resolve()))) is not None:
            raise UserError(f"{path}: a {kind}; only SAEs can be loaded")
        known = fields.architecture in ("jump_relu", "jumprelu")
        require(known, f"{file}: architecture", fields.architecture, "must be 'jump_relu'")
        d_in, d_sae = matrix_shape(path / WEIGHTS, shapes, "w_enc")
        return InferenceConfig(d_in, d_sae, apply_b_dec_to_input=False, metadata=_metadata(fields))

    def load(self, path: Path) -> StoredSAE:
        cfg, weights = self.describe(path), read_safetensors(path / WEIGHTS)
        d, m = cfg.d_in, cfg.d_sae
        shapes: dict[str, tuple[int, ...]] = {"W_enc": (d, m), "b_enc": (m,), "W_dec": (m, d), "b_dec": (d,)}
        tensors = {name: weights.take(name.lower(), shape) for name, shape in shapes.items()}
        return StoredSAE(cfg, tensors | {"threshold": one_threshold(weights.take("threshold", (m,), ()))})


FORMATS.register("gemma_scope_2", GemmaScope2(), __name__)


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


def _metadata(fields: Fields) -> dict[str, Any]:
    """Model and hook point as they are named elsewhere."""
    model, hook = fields.model_name, re.fullmatch(r"model\.layers\.(\d+)\.(.+)", fields.hf_hook_point_in or "")
    if model is not None:
        model = (model if "/" in model else f"google/{model}").replace("gemma-v3", "gemma-3")
        model = model.removesuffix("-pt") if "270m" in model else model  # as the hub names it
    site = SITES.get(hook[2]) if hook else None
    return metadata(
        model_name=model,
        hook_name=f"blocks.{hook[1]}.{site}" if hook and site else None,
        hook_point=None if site else fields.hf_hook_point_in,
        context_size=1024,
        prepend_bos=True,
    )
