"""Llama Scope: hyperparams.json and checkpoints/final.safetensors with encoder.weight, decoder.weight and biases.

These SAEs take activations with the mean norm sqrt(d_in). Here they take the activations themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sampled_sae.config import Config, Positive, PositiveNumber, require
from sampled_sae.formats import FORMATS, ReadOnly, StoredSAE
from sampled_sae.formats.tensors import (
    fold_decoder_norms_,
    fold_scale_,
    known_fields,
    metadata,
    one_threshold,
    read_object,
    read_safetensors,
)
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError

CONFIG, WEIGHTS = "hyperparams.json", Path("checkpoints") / "final.safetensors"
ACTIVATIONS = {"jumprelu": "jumprelu", "topk": "topk", "relu": "standard"}
MODEL = "meta-llama/Llama-3.1-8B"


@dataclass(frozen=True, slots=True)
class Fields(Config):
    """Fields of hyperparams.json."""

    d_model: Positive
    d_sae: Positive
    act_fn: str = "jumprelu"
    jump_relu_threshold: float = 0.0
    """In the units of the activations."""
    top_k: Positive | None = None
    norm_activation: str = "dataset-wise"
    dataset_average_activation_norm: dict[str, PositiveNumber] = field(default_factory=dict)
    """Mean norm of the activations, `in` and `out`."""
    use_decoder_bias: bool = True
    use_glu_encoder: bool = False
    apply_decoder_bias_to_pre_encoder: bool = False
    sparsity_include_decoder_norm: bool = False
    """Whether pre-activations are multiplied by the norms of the decoder rows before the threshold."""
    hook_point_in: str | None = None
    hook_point_out: str | None = None


class LlamaScope(ReadOnly):
    files = (CONFIG, WEIGHTS.as_posix())

    def recognize(self, path: Path) -> bool:
        return (path / CONFIG).is_file() and (path / WEIGHTS).parent.is_dir()

    def describe(self, path: Path) -> InferenceConfig:
        file, fields = path / CONFIG, _read(path)
        if fields.hook_point_out not in (None, fields.hook_point_in):
            raise UserError(
                f"{file}: hook_point_out = {fields.hook_point_out!r}: a transcoder; only SAEs can be loaded"
            )
        require(fields.act_fn in ACTIVATIONS, f"{file}: act_fn", fields.act_fn, f"must be one of {list(ACTIVATIONS)}")
        require(not fields.use_glu_encoder, f"{file}: use_glu_encoder", True, "an encoder with gates cannot be loaded")
        right = "must be 'dataset-wise' or 'inference'"
        require(
            fields.norm_activation in ("dataset-wise", "inference"),
            f"{file}: norm_activation",
            fields.norm_activation,
            right,
        )
        norms = fields.dataset_average_activation_norm
        if fields.norm_activation == "dataset-wise" and "in" not in norms:
            raise UserError(f"{file}: dataset_average_activation_norm = {norms}: must have `in`")
        content = {
            "d_in": fields.d_model,
            "d_sae": fields.d_sae,
            "architecture": ACTIVATIONS[fields.act_fn],
            "k": fields.top_k,
            "apply_b_dec_to_input": fields.apply_decoder_bias_to_pre_encoder,
            "metadata": metadata(
                model_name=MODEL if "Llama3_1-8B" in str(path.resolve()) else None,
                hook_name=fields.hook_point_in,
                context_size=1024,
                prepend_bos=True,
            ),
        }
        return InferenceConfig.from_dict(content, file)

    def load(self, path: Path) -> StoredSAE:
        cfg, fields, weights = self.describe(path), _read(path), read_safetensors(path / WEIGHTS)
        d, m = cfg.d_in, cfg.d_sae
        tensors = {
            "W_enc": weights.take("encoder.weight", (m, d)).T,
            "b_enc": weights.take("encoder.bias", (m,)),
            "W_dec": weights.take("decoder.weight", (d, m)).T,
        }
        tensors["b_dec"] = (
            weights.take("decoder.bias", (d,)) if fields.use_decoder_bias else torch.zeros(d).to(tensors["W_dec"])
        )
        norms = fields.dataset_average_activation_norm
        scale = math.sqrt(d) / norms["in"] if fields.norm_activation == "dataset-wise" else 1.0
        if cfg.architecture == "jumprelu":
            threshold = torch.full((m,), fields.jump_relu_threshold * scale, dtype=torch.float64)
            if fields.sparsity_include_decoder_norm:
                threshold = threshold / tensors["W_dec"].double().norm(dim=1)  # a row of zeros never passes
            tensors["threshold"] = one_threshold(threshold.clamp_max(torch.finfo(torch.float32).max))
        elif cfg.architecture == "topk" and fields.sparsity_include_decoder_norm:
            fold_decoder_norms_(tensors)
        fold_scale_(tensors, scale)
        return StoredSAE(cfg, tensors)


FORMATS.register("llama_scope", LlamaScope(), __name__)


def _read(path: Path) -> Fields:
    return known_fields(Fields, read_object(path / CONFIG), path / CONFIG)
