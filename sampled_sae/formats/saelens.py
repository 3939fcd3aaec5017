"""Our folder on disk, which is a SAELens v6 SAE (architecture jumprelu) with our configuration beside it.

cfg.json and sae_weights.safetensors are what SAELens reads; sampled_sae.json is ours.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sampled_sae.config import read_file, to_dict, versioned
from sampled_sae.method.config import SAEConfig, sae_config_from_dict
from sampled_sae.sae import SAE
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import new_folder, read_json

FILES = {"cfg.json", "sae_weights.safetensors", "sampled_sae.json", "sparsity.safetensors"}
SAELENS_VERSION = "6.0.0"
"""The format's version; SAELens would read a folder that names none as one of its version 5."""


def save(sae: SAE, folder: Path) -> Path:
    """Write the folder whole or not at all; an SAE that is there already is replaced, nothing else is."""
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - FILES):
        raise UserError(f"{folder}: holds something else than an SAE; save into a new folder")
    weights = {
        "W_enc": sae.W_enc,
        "W_dec": sae.W_dec,
        "b_enc": sae.b_enc,
        "b_dec": sae.b_dec,
        "threshold": sae.threshold.expand(sae.d_sae).to(sae.dtype),
    }
    with new_folder(folder) as temporary:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(plain, temporary / "sae_weights.safetensors")
        (temporary / "cfg.json").write_text(json.dumps(saelens_config(sae), indent=2, allow_nan=False) + "\n")
        (temporary / "sampled_sae.json").write_text(json.dumps(own_config(sae), indent=2, allow_nan=False) + "\n")
    return folder


def saelens_config(sae: SAE) -> dict[str, Any]:
    """cfg.json: what SAELens needs to know."""
    known = {"model_name", "hook_name", "hook_head_index", "context_size", "prepend_bos", "dataset_path"}
    metadata = dict.fromkeys(sorted(known)) | {k: v for k, v in sae.metadata.items() if k in known}
    return {
        "architecture": "jumprelu",
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": str(sae.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": metadata | {"sae_lens_version": SAELENS_VERSION, "sae_lens_training_version": None},
    }


def own_config(sae: SAE) -> dict[str, Any]:
    """sampled_sae.json: how the SAE was trained and both of its thresholds."""
    ema = float(sae.threshold_ema)
    content = {
        "config": None if sae.config is None else to_dict(sae.config),
        "threshold_ema": ema if math.isfinite(ema) else None,
        "metadata": sae.metadata,
    }
    return versioned("sae", content)


class Description(NamedTuple):
    """What a folder says about its SAE."""

    d: int
    m: int
    config: SAEConfig | None
    metadata: dict[str, Any]
    threshold_ema: float | None


def describe(folder: Path) -> Description:
    """Read a folder without its weights."""
    config = _read_config(folder)
    metadata = {k: v for k, v in (config.get("metadata") or {}).items() if v is not None}
    path = folder / "sampled_sae.json"
    if not path.exists():
        return Description(config["d_in"], config["d_sae"], None, metadata, None)
    own = read_file(path, "sae")
    if not {"config", "threshold_ema", "metadata"} <= own.keys():
        raise UserError(f"{path}: not a configuration of this program")
    trained = None if own["config"] is None else sae_config_from_dict(own["config"])
    return Description(config["d_in"], config["d_sae"], trained, own["metadata"], own["threshold_ema"])


def load(folder: Path) -> SAE:
    """Read a folder that `save` wrote, or a SAELens v6 jumprelu folder without our configuration."""
    said, path = describe(folder), folder / "sae_weights.safetensors"
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged ({error})") from None
    _check_shapes(path, weights, said.d, said.m)
    return _build(said, weights)


def _read_config(folder: Path) -> dict[str, Any]:
    """cfg.json, if it is of an SAE that can be loaded."""
    if not (folder / "cfg.json").exists():
        raise UserError(_nothing_there(folder))
    config = read_json(folder / "cfg.json")
    for name, right in (
        ("architecture", "jumprelu"),
        ("apply_b_dec_to_input", True),
        ("normalize_activations", "none"),
        ("reshape_activations", "none"),
    ):
        if not isinstance(config, dict) or config.get(name, right) != right:
            found = config.get(name) if isinstance(config, dict) else config
            raise UserError(f"{folder / 'cfg.json'}: {name} = {found!r}: only {right!r} can be loaded")
    for name in ("architecture", "d_in", "d_sae"):
        if name not in config:
            raise UserError(f"{folder / 'cfg.json'}: {name} is missing: not a SAELens v6 configuration")
    whole: dict[str, Any] = config
    return whole


def _nothing_there(folder: Path) -> str:
    """That a folder is not an SAE's; where it is a run's, the SAEs in it."""
    if not folder.is_dir():
        return f"{folder}: no SAE there (no such folder)"
    below = ("*", "saes/*", "*/saes/*", "*/*/saes/*")  # of a run, of its layers or passes, of both
    found = sorted({path.parent for pattern in below for path in folder.glob(f"{pattern}/cfg.json")})
    if not found:
        return f"{folder}: no SAE in this folder (no cfg.json)"
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{folder}: no SAE itself, but there are SAEs in it: {', '.join(map(str, found[:3]))}{more}; name one"


def _check_shapes(path: Path, weights: dict[str, torch.Tensor], d: int, m: int) -> None:
    shapes = {"W_enc": (d, m), "W_dec": (m, d), "b_enc": (m,), "b_dec": (d,), "threshold": (m,)}
    for name, shape in shapes.items():
        found = tuple(weights[name].shape) if name in weights else None
        if found != shape:
            raise UserError(f"{path}: {name} has shape {found}: must be {shape}")


def _build(said: Description, weights: dict[str, torch.Tensor]) -> SAE:
    sae = SAE(said.d, said.m, config=said.config, dtype=weights["W_dec"].dtype)
    threshold = weights["threshold"].float()
    with torch.no_grad():
        sae.W_enc_rows.copy_(weights["W_enc"].T)
        for name in ("b_enc", "W_dec", "b_dec"):
            getattr(sae, name).copy_(weights[name])
    # One number for all latents is ours; another trainer's SAE may have one for each.
    sae.threshold = threshold[0].clone() if bool((threshold == threshold[0]).all()) else threshold
    sae.metadata = said.metadata
    if said.threshold_ema is not None:
        sae.threshold_ema.fill_(said.threshold_ema)
    return sae
