"""The native format: a SAELens v6 folder (cfg.json, sae_weights.safetensors) with sampled_sae.json beside it.

Folders of SAELens itself are read in versions 5 and 6, final SAEs and checkpoints of its training.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sampled_sae.config import Config, PositiveNumber, read_file, write_file
from sampled_sae.formats import FORMATS, StoredSAE
from sampled_sae.formats.tensors import (
    Archive,
    fold_decoder_norms_,
    fold_scale_,
    known_fields,
    native_shapes,
    one_threshold,
    read_object,
    read_safetensors,
    wide,
)
from sampled_sae.method.architectures import ARCHITECTURES, InferenceConfig
from sampled_sae.method.config import SAEConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import checksum, new_folder, write_json

CONFIG, WEIGHTS, OWN = "cfg.json", "sae_weights.safetensors", "sampled_sae.json"
SCALER, WHITENING = "activation_scaler.json", "activation_whitening.safetensors"
"""In checkpoints of SAELens: the factor of the activations, the affine map that whitens them."""
FILES = {CONFIG, WEIGHTS, OWN, "sparsity.safetensors"}
SAELENS_VERSION = "6.0.0"
"""Version of the format; SAELens reads a folder without one as version 5."""
SHARED = ("architecture", "d_in", "d_sae", "k", "apply_b_dec_to_input", "normalize_activations")
"""Fields that cfg.json and `InferenceConfig` share."""
METADATA = ("context_size", "dataset_path", "hook_head_index", "hook_name", "model_name", "prepend_bos")
"""Entries of the metadata that SAELens knows; version 5 has them beside the other fields."""
TRAINED = {"batchtopk": "jumprelu", "matryoshka_batchtopk": "jumprelu"}
"""Architectures of SAELens's training and the one that it saves for inference."""
EXPECTED = "expected_average_only_in"
"""Activations times one factor: folded in before inference."""
WHITENED = "covariance_whitening"


@dataclass(frozen=True, slots=True)
class Own(Config):
    """Content of sampled_sae.json: what SAELens has no field for."""

    config: SAEConfig | None
    """Settings of the training."""
    threshold_ema: float | None
    metadata: dict[str, Any]
    k: int | None = None
    """Active latents per token; None in files of earlier versions, where the settings of the training have it."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of other files of the folder; takes about 0.4 s per GB on saving and on loading."""


@dataclass(frozen=True, slots=True)
class Scales(Config):
    """Fields of cfg.json that are folded into the weights, and that of activation_scaler.json."""

    rescale_acts_by_decoder_norm: bool = False
    finetuning_scaling_factor: bool = False
    scaling_factor: PositiveNumber = 1.0


class SAELens:
    files = (CONFIG, WEIGHTS, OWN, SCALER, WHITENING)

    def recognize(self, path: Path) -> bool:
        return (path / CONFIG).exists() and ((path / WEIGHTS).exists() or not (path / "sae.safetensors").exists())

    def describe(self, path: Path) -> InferenceConfig:
        config, own = _read_config(path), read_own(path)
        content = {name: config[name] for name in SHARED if name in config} | {"prefixes": _prefixes(config)}
        if own is not None:
            k = own.k or (own.config and own.config.k)
            content = {"k": k} | content | {"training": own.config, "metadata": own.metadata}
        else:
            content["metadata"] = config.get("metadata") or {}
        cfg = InferenceConfig.from_dict(content, path / CONFIG)
        if own is None:  # SAELens writes null for what is unknown
            for name in [name for name, value in cfg.metadata.items() if value is None]:
                del cfg.metadata[name]
        verify(path, own, CONFIG)  # last: a wrong value has a clearer line
        return cfg

    def load(self, path: Path) -> StoredSAE:
        cfg, own, content = self.describe(path), read_own(path), read_object(path / CONFIG)
        verify(path, own, WEIGHTS)
        weights = read_safetensors(path / WEIGHTS)
        shapes = native_shapes(cfg)
        tensors = {name: weights.take(name, shape) for name, shape in shapes.items() if name != "threshold"}
        if "threshold" in shapes:
            tensors["threshold"] = _threshold(weights, cfg.d_sae)
        _fold_(tensors, weights, path, content)
        if own is not None and own.threshold_ema is not None:
            tensors["threshold_ema"] = torch.tensor(own.threshold_ema)
        return StoredSAE(cfg, tensors)

    def save(self, sae: StoredSAE, path: Path) -> Path:
        """Write the folder; an SAE that is there already is replaced, nothing else is."""
        path = path.resolve()
        if path.exists() and (not path.is_dir() or {file.name for file in path.iterdir()} - FILES):
            raise UserError(f"{path}: holds something else than an SAE; save into a new folder")
        dtype = sae.tensors["W_dec"].dtype
        weights = {name: sae.tensors[name].expand(shape).to(dtype) for name, shape in native_shapes(sae.cfg).items()}
        if "threshold" in weights:  # rounded to 16 bits, it would let other activations pass
            weights["threshold"] = wide(sae.tensors["threshold"].expand(sae.cfg.d_sae))
        with new_folder(path) as temporary:
            save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, temporary / WEIGHTS)
            write_json(temporary / CONFIG, saelens_config(sae.cfg, dtype))
            average = float(sae.tensors.get("threshold_ema", math.nan))
            own = Own(
                config=sae.cfg.training,
                threshold_ema=average if math.isfinite(average) else None,
                metadata=sae.cfg.metadata,
                k=sae.cfg.k,
                checksums={name: checksum(temporary / name) for name in (CONFIG, WEIGHTS)},
            )
            write_file(temporary / OWN, "sae", own.to_dict())
        return path


FORMATS.register("saelens", SAELens(), __name__)


def saelens_config(cfg: InferenceConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Content of cfg.json."""
    metadata = {name: cfg.metadata.get(name) for name in METADATA}
    if cfg.prefixes:
        metadata["training_architecture"] = "matryoshka_batchtopk"
        metadata["training_architecture_details"] = {"matryoshka_widths": list(cfg.prefixes)}
    content = {
        "architecture": cfg.architecture,
        "d_in": cfg.d_in,
        "d_sae": cfg.d_sae,
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": cfg.apply_b_dec_to_input,
        "normalize_activations": cfg.normalize_activations,
        "reshape_activations": "none",
        "metadata": metadata | {"sae_lens_version": SAELENS_VERSION, "sae_lens_training_version": None},
    }
    return content | ({"k": cfg.k} if ARCHITECTURES[cfg.architecture].needs_k else {})


def _read_config(folder: Path) -> dict[str, Any]:
    """cfg.json as version 6 has it for inference, if it is of an SAE that can be loaded."""
    path = folder / CONFIG
    config = _upgraded(read_object(path))
    for name in ("architecture", "d_in", "d_sae"):
        if config.get(name) is None:
            raise UserError(f"{path}: {name} is missing: not a SAELens configuration")
    allowed: dict[str, tuple[Any, ...]] = {
        "architecture": (*sorted(ARCHITECTURES), *TRAINED),
        "normalize_activations": ("none", "constant_norm_rescale", "layer_norm", EXPECTED, WHITENED),
        "reshape_activations": ("none", "hook_z"),  # hook_z: the heads one after the other
        "activation_fn": ("relu", "topk"),
    }
    for name, right in allowed.items():
        if config.get(name, right[0]) not in right:
            only = ", ".join(map(repr, right))
            raise UserError(f"{path}: {name} = {config[name]!r}: only {only} can be loaded")
    if config.get("normalize_activations") in (EXPECTED, WHITENED):
        config["normalize_activations"] = "none"
    if config["architecture"] in TRAINED:
        config["architecture"] = TRAINED[config["architecture"]]
        if isinstance(config.get("k"), float):  # a mean over the batch
            config["k"] = int(config["k"]) if config["k"] >= 1 and config["k"].is_integer() else None
    return config


def _upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """cfg.json of version 5, where metadata are flat and TopK is an activation function, as version 6 has it."""
    if "metadata" in config:
        return config
    old = {"hook_point": "hook_name", "hook_point_head_index": "hook_head_index", "activation_fn_str": "activation_fn"}
    config = {"architecture": "standard"} | {old.get(name, name): value for name, value in config.items()}
    settings = config.get("activation_fn_kwargs")
    if config.get("activation_fn") == "topk" and isinstance(settings, dict):
        config |= {"architecture": "topk", "k": settings.get("k")}
    normalize = config.get("normalize_activations")
    config["normalize_activations"] = {True: EXPECTED, False: "none", None: "none"}.get(normalize, normalize)
    return config | {"metadata": {name: config.get(name) for name in METADATA}}


def _prefixes(config: dict[str, Any]) -> Any:
    """Widths of a Matryoshka SAE: of its training, or as SAELens keeps them in the metadata for inference."""
    about = config.get("metadata") or {}
    details = about.get("training_architecture_details") if isinstance(about, dict) else None
    found = config.get("matryoshka_widths") or (isinstance(details, dict) and details.get("matryoshka_widths"))
    return found or ()


def _threshold(weights: Archive, d_sae: int) -> Tensor:
    """threshold, one for all latents or for each; topk_threshold of BatchTopK's training; log_threshold of early ones.

    An SAE that was trained here has one for all.
    """
    shapes = (), (1,), (d_sae,)
    if "topk_threshold" in weights.tensors:
        return one_threshold(weights.take("topk_threshold", *shapes))
    if "log_threshold" in weights.tensors:
        return one_threshold(weights.take("log_threshold", *shapes).exp())
    return one_threshold(weights.take("threshold", *shapes))


def _fold_(tensors: dict[str, Tensor], weights: Archive, folder: Path, content: dict[str, Any]) -> None:
    """Fold in what SAELens multiplies with at inference: factors of codes, of activations, norms of decoder rows."""
    scales = known_fields(Scales, content, folder / CONFIG)
    name = "scaling_factor" if "scaling_factor" in weights.tensors else "finetuning_scaling_factor"
    if name in weights.tensors:
        factors = weights.take(name, tuple(tensors["W_dec"].shape[:1]))
        if scales.finetuning_scaling_factor:  # of the codes, for decoding only
            tensors["W_dec"] = wide(tensors["W_dec"]) * factors[:, None]
        elif not bool((factors == 1).all()):
            raise UserError(f"{weights.path}: {name} is there, but finetuning_scaling_factor is false in {CONFIG}")
    if _upgraded(content).get("normalize_activations") == EXPECTED:
        if not (folder / SCALER).exists():
            missing = f"no {SCALER} with the factor of the activations; multiply them by it yourself"
            warnings.warn(f"{folder}: normalize_activations = {EXPECTED!r}, but {missing}", stacklevel=4)
        else:
            scale = known_fields(Scales, read_object(folder / SCALER), folder / SCALER).scaling_factor
            fold_scale_(tensors, scale)
            if scales.rescale_acts_by_decoder_norm and "threshold" in tensors:
                tensors["threshold"] = tensors["threshold"] / scale  # the norms, which it contains, became smaller
    if scales.rescale_acts_by_decoder_norm and "b_enc" in tensors:
        fold_decoder_norms_(tensors)
    if _upgraded(content).get("normalize_activations") == WHITENED:
        _fold_whitening_(tensors, read_safetensors(folder / WHITENING), content.get("apply_b_dec_to_input", True))


def _fold_whitening_(tensors: dict[str, Tensor], whitening: Archive, subtracts: bool) -> None:
    """An SAE of z = (x - mean) matrix takes x, with the same codes."""
    d = tensors["b_dec"].numel()
    mean = wide(whitening.take("mean", (d,)))
    matrix, inverse = (wide(whitening.take(name, (d, d))) for name in ("matrix", "inverse_matrix"))
    W_enc = matrix @ tensors["W_enc"].to(matrix)
    if not subtracts:  # otherwise b_dec, which is subtracted, contains the mean
        factors = {"b_mag": tensors["r_mag"].to(matrix).exp()} if "r_mag" in tensors else {}
        for name in tensors.keys() & {"b_enc", "b_gate", "b_mag"}:
            tensors[name] = tensors[name].to(matrix) - (mean @ W_enc) * factors.get(name, 1.0)
    tensors["W_enc"], tensors["W_dec"] = W_enc, tensors["W_dec"].to(matrix) @ inverse
    tensors["b_dec"] = tensors["b_dec"].to(matrix) @ inverse + mean


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
