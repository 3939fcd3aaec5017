"""The native format: a SAELens v6 folder (cfg.json, sae_weights.safetensors) with sampled_sae.json beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sampled_sae.config import Config, read_file, write_file
from sampled_sae.formats import FORMATS, StoredSAE
from sampled_sae.method.architectures import ARCHITECTURES, InferenceConfig
from sampled_sae.method.config import SAEConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import checksum, new_folder, read_json, write_json

CONFIG, WEIGHTS, OWN = "cfg.json", "sae_weights.safetensors", "sampled_sae.json"
FILES = {CONFIG, WEIGHTS, OWN, "sparsity.safetensors"}
SAELENS_VERSION = "6.0.0"
"""Version of the format; SAELens reads a folder without one as version 5."""
SHARED = ("architecture", "d_in", "d_sae", "k", "apply_b_dec_to_input")
"""Fields that cfg.json and `InferenceConfig` share."""
METADATA = ("context_size", "dataset_path", "hook_head_index", "hook_name", "model_name", "prepend_bos")
"""Entries of the metadata that SAELens knows."""


@dataclass(frozen=True, slots=True)
class Own(Config):
    """Content of sampled_sae.json: what SAELens has no field for."""

    config: SAEConfig | None
    """Settings of the training."""
    threshold_ema: float | None
    metadata: dict[str, Any]
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of other files of the folder; takes about 0.4 s per GB on saving and on loading."""


class SAELens:
    files = (CONFIG, WEIGHTS, OWN)

    def recognize(self, path: Path) -> bool:
        return (path / CONFIG).exists()

    def describe(self, path: Path) -> InferenceConfig:
        config, own = _read_config(path), read_own(path)
        content = {name: config[name] for name in SHARED if name in config}
        if own is not None:
            training = own.config
            content = {"k": training and training.k} | content | {"training": training, "metadata": own.metadata}
        else:
            content["metadata"] = config.get("metadata") or {}
        cfg = InferenceConfig.from_dict(content, path / CONFIG)
        if own is None:  # SAELens writes null for what is unknown
            for name in [name for name, value in cfg.metadata.items() if value is None]:
                del cfg.metadata[name]
        verify(path, own, CONFIG)  # last: a wrong value has a clearer line
        return cfg

    def load(self, path: Path) -> StoredSAE:
        cfg, own, file = self.describe(path), read_own(path), path / WEIGHTS
        verify(path, own, WEIGHTS)
        try:
            weights = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: missing or damaged ({error})") from None
        tensors = {name: _checked(file, weights, name, shape) for name, shape in _shapes(cfg).items()}
        if read_json(path / CONFIG).get("rescale_acts_by_decoder_norm"):
            _fold_decoder_norms_(tensors)
        if "threshold" in tensors:
            threshold = tensors["threshold"].float()
            # SAEs trained here have one threshold for all latents; others may have one for each.
            tensors["threshold"] = threshold[0].clone() if bool((threshold == threshold[0]).all()) else threshold
        if own is not None and own.threshold_ema is not None:
            tensors["threshold_ema"] = torch.tensor(own.threshold_ema)
        return StoredSAE(cfg, tensors)

    def save(self, sae: StoredSAE, path: Path) -> Path:
        """Write the folder; an SAE that is there already is replaced, nothing else is."""
        path = path.resolve()
        if path.exists() and (not path.is_dir() or {file.name for file in path.iterdir()} - FILES):
            raise UserError(f"{path}: holds something else than an SAE; save into a new folder")
        dtype = sae.tensors["W_dec"].dtype
        weights = {name: sae.tensors[name].expand(shape).to(dtype) for name, shape in _shapes(sae.cfg).items()}
        with new_folder(path) as temporary:
            save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, temporary / WEIGHTS)
            write_json(temporary / CONFIG, saelens_config(sae.cfg, dtype))
            average = float(sae.tensors.get("threshold_ema", math.nan))
            own = Own(
                config=sae.cfg.training,
                threshold_ema=average if math.isfinite(average) else None,
                metadata=sae.cfg.metadata,
                checksums={name: checksum(temporary / name) for name in (CONFIG, WEIGHTS)},
            )
            write_file(temporary / OWN, "sae", own.to_dict())
        return path


FORMATS.register("saelens", SAELens(), __name__)


def saelens_config(cfg: InferenceConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Content of cfg.json."""
    metadata = {name: cfg.metadata.get(name) for name in METADATA}
    content = {
        "architecture": cfg.architecture,
        "d_in": cfg.d_in,
        "d_sae": cfg.d_sae,
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": cfg.apply_b_dec_to_input,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": metadata | {"sae_lens_version": SAELENS_VERSION, "sae_lens_training_version": None},
    }
    return content | ({"k": cfg.k} if ARCHITECTURES[cfg.architecture].needs_k else {})


def _read_config(folder: Path) -> dict[str, Any]:
    """cfg.json, if it is of an SAE that can be loaded."""
    path = folder / CONFIG
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds {config!r}: not a SAELens v6 configuration")
    for name in ("architecture", "d_in", "d_sae"):
        if name not in config:
            raise UserError(f"{path}: {name} is missing: not a SAELens v6 configuration")
    allowed: dict[str, tuple[Any, ...]] = {
        "architecture": tuple(sorted(ARCHITECTURES)),
        "normalize_activations": ("none",),
        "reshape_activations": ("none",),
    }
    for name, right in allowed.items():
        if config.get(name, right[0]) not in right:
            only = ", ".join(map(repr, right))
            raise UserError(f"{path}: {name} = {config[name]!r}: only {only} can be loaded")
    return config


def verify(folder: Path, own: Own | None, name: str) -> None:
    """Compare the checksum of a file of the folder, if sampled_sae.json has one."""
    right = own and own.checksums.get(name)
    try:
        if right is not None and right != (found := checksum(folder / name)):
            raise UserError(f"{folder / name}: missing or damaged (its CRC-32 is {found}, but {OWN} has {right})")
    except OSError as error:
        raise UserError(f"{folder / name}: missing or damaged ({error})") from None


def read_own(folder: Path) -> Own | None:
    """sampled_sae.json; None if another program wrote the folder."""
    path = folder / OWN
    return Own.from_dict(read_file(path, "sae"), path) if path.exists() else None


def _shapes(cfg: InferenceConfig) -> dict[str, tuple[int, ...]]:
    """Tensors in the weights file, by name."""
    common: dict[str, tuple[int, ...]] = {
        "W_enc": (cfg.d_in, cfg.d_sae),
        "W_dec": (cfg.d_sae, cfg.d_in),
        "b_dec": (cfg.d_in,),
    }
    return common | {name: (cfg.d_sae,) for name in ARCHITECTURES[cfg.architecture].tensors}


def _checked(path: Path, weights: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    found = tuple(weights[name].shape) if name in weights else None
    if found != shape:
        raise UserError(f"{path}: {name} has shape {found}: must be {shape}")
    return weights[name]


def _fold_decoder_norms_(tensors: dict[str, Tensor]) -> None:
    """Codes that are multiplied by the norms of the decoder rows, and divided by them for decoding: unit rows."""
    norms = tensors["W_dec"].norm(dim=1)
    tensors["W_enc"], tensors["b_enc"] = tensors["W_enc"] * norms, tensors["b_enc"] * norms
    tensors["W_dec"] = tensors["W_dec"] / norms[:, None]
