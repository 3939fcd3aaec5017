"""Folders of sparsify, one per hook point: cfg.json and sae.safetensors; the run's config.json is one folder above."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sampled_sae.config import Config, Count, Positive, require
from sampled_sae.formats import FORMATS, ReadOnly, StoredSAE
from sampled_sae.formats.tensors import known_fields, metadata, read_object, read_safetensors
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"
UNSUPPORTED = {
    "transcode": "a transcoder",
    "skip_connection": "a skip transcoder",
    "embed_skip": "an SAE with a skip connection from the embeddings",
    "gram_lookup": "an SAE of what n-grams do not explain",
    "signed": "an SAE with negative codes",
}
"""Settings that make it something else than an SAE with codes that are not negative."""


@dataclass(frozen=True, slots=True)
class Fields(Config):
    """Fields of cfg.json; those of `UNSUPPORTED` must be false."""

    d_in: Positive
    k: Positive = 32
    activation: str = "topk"
    expansion_factor: Positive = 32
    num_latents: Count = 0
    transcode: bool = False
    skip_connection: bool = False
    embed_skip: bool = False
    gram_lookup: bool = False
    signed: bool = False


@dataclass(frozen=True, slots=True)
class Run(Config):
    """Fields of the run's config.json."""

    model: str | None = None
    dataset: str | None = None
    ctx_len: Positive | None = None


class Sparsify(ReadOnly):
    files = (CONFIG, WEIGHTS, "../config.json")

    def recognize(self, path: Path) -> bool:
        return (path / WEIGHTS).is_file() and (path / CONFIG).is_file()

    def describe(self, path: Path) -> InferenceConfig:
        file = path / CONFIG
        fields = known_fields(Fields, read_object(file), file)
        for name, what in UNSUPPORTED.items():
            if getattr(fields, name):
                raise UserError(f"{file}: {name} = true: {what}; only SAEs can be loaded")
        require(fields.activation in ("topk", "groupmax"), f"{file}: activation", fields.activation, "unknown")
        d_sae = fields.num_latents or fields.d_in * fields.expansion_factor
        whole = fields.activation == "topk" or d_sae % fields.k == 0
        require(whole, f"{file}: k", fields.k, f"must divide the number of latents, {d_sae}, for groupmax")
        return InferenceConfig(fields.d_in, d_sae, fields.activation, fields.k, metadata=_metadata(path))

    def load(self, path: Path) -> StoredSAE:
        cfg, weights = self.describe(path), read_safetensors(path / WEIGHTS)
        if "W_skip" in weights.tensors:
            raise UserError(f"{weights.path}: W_skip: a skip transcoder; only SAEs can be loaded")
        tensors = {
            "W_enc": weights.take("encoder.weight", (cfg.d_sae, cfg.d_in)).T,
            "b_enc": weights.take("encoder.bias", (cfg.d_sae,)),
            "W_dec": weights.take("W_dec", (cfg.d_sae, cfg.d_in)),
            "b_dec": weights.take("b_dec", (cfg.d_in,)),
        }
        return StoredSAE(cfg, tensors)


FORMATS.register("sparsify", Sparsify(), __name__)


def _metadata(path: Path) -> dict[str, object]:
    """Model, text and hook point: the folder has the name of the module, such as layers.5 or layers.5.mlp."""
    file = path.resolve().parent / "config.json"
    run = known_fields(Run, read_object(file), file) if file.is_file() else Run()
    module = path.resolve().name
    found = re.fullmatch(r"(?:.*\.)?(?:layers|h)[._](\d+)(\.mlp)?", module)
    hook = found and f"blocks.{found[1]}.hook_{'mlp_out' if found[2] else 'resid_post'}"
    named = module if "." in module or module == "embed_tokens" else None
    return metadata(
        model_name=run.model,
        dataset_path=run.dataset,
        context_size=run.ctx_len,
        hook_name=hook,
        hook_point=None if hook else named,
    )
