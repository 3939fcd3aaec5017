"""Folders of dictionary_learning: ae.pt (a state dict of torch) and config.json with the trainer's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sampled_sae.config import Config, Positive, PositiveNumber, shown
from sampled_sae.formats import FORMATS, StoredSAE
from sampled_sae.formats.tensors import (
    Archive,
    fold_decoder_norms_,
    known_fields,
    metadata,
    one_threshold,
    read_object,
    read_pickle,
    wide,
)
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import new_folder, write_json

WEIGHTS, CONFIG = "ae.pt", "config.json"
CLASSES = {
    "AutoEncoder": "standard",
    "AutoEncoderNew": "standard",
    "GatedAutoEncoder": "gated",
    "JumpReluAutoEncoder": "jumprelu",
    "AutoEncoderTopK": "topk",
    "BatchTopKSAE": "jumprelu",
    "MatryoshkaBatchTopKSAE": "jumprelu",
}
"""Architectures by the name of the class."""
NO_SUBTRACTION = ("AutoEncoderNew", "JumpReluAutoEncoder")
"""Classes that do not subtract the decoder's bias from the input."""
UNTRAINED = -1.0  # threshold of an SAE whose training stopped before the threshold was first estimated


@dataclass(frozen=True, slots=True)
class Trainer(Config):
    """Fields of `trainer` in config.json."""

    dict_class: str
    activation_dim: Positive
    dict_size: Positive
    k: Positive | None = None
    group_sizes: tuple[Positive, ...] = ()
    layer: int | None = None
    lm_name: str | None = None
    submodule_name: str | None = None


@dataclass(frozen=True, slots=True)
class Buffer(Config):
    """Fields of `buffer` in config.json."""

    ctx_len: Positive | None = None


@dataclass(frozen=True, slots=True)
class Interrupted(Config):
    """Fields of ae.pt in a run that was not finished."""

    norm_factor: PositiveNumber = 1.0


class DictionaryLearning:
    files = (WEIGHTS, CONFIG)

    def recognize(self, path: Path) -> bool:
        return (path / WEIGHTS).is_file()

    def describe(self, path: Path) -> InferenceConfig:
        content = read_object(path / CONFIG)
        trainer = known_fields(Trainer, content.get("trainer", content), path / CONFIG)
        if trainer.dict_class not in CLASSES:
            known = ", ".join(CLASSES)
            raise UserError(f"{path / CONFIG}: dict_class = {shown(trainer.dict_class)}: must be one of {known}")
        buffer = content.get("buffer")
        about = metadata(
            model_name=trainer.lm_name,
            hook_name=_hook_name(trainer),
            context_size=known_fields(Buffer, buffer, path / CONFIG).ctx_len if isinstance(buffer, dict) else None,
        )
        sizes = trainer.group_sizes if trainer.dict_class.startswith("Matryoshka") else ()
        content = {
            "d_in": trainer.activation_dim,
            "d_sae": trainer.dict_size,
            "architecture": CLASSES[trainer.dict_class],
            "k": trainer.k,
            "apply_b_dec_to_input": trainer.dict_class not in NO_SUBTRACTION,
            "prefixes": [sum(sizes[: n + 1]) for n in range(len(sizes))],
            "metadata": about,
        }
        return InferenceConfig.from_dict(content, path / CONFIG)

    def load(self, path: Path) -> StoredSAE:
        cfg, content = self.describe(path), read_object(path / CONFIG)
        weights, scale = read_pickle(path / WEIGHTS), 1.0
        if isinstance(inner := weights.tensors.get("ae"), dict):  # a run that was interrupted
            scale = known_fields(Interrupted, dict(weights.tensors), weights.path).norm_factor
            weights = Archive(weights.path, inner)
        cfg = _agreed(cfg, weights, path / CONFIG)
        name = str(content.get("trainer", content)["dict_class"])
        tensors = _tensors(name, weights, cfg.d_in, cfg.d_sae)
        for part in [part for part in tensors if scale != 1.0 and (part.startswith("b_") or part == "threshold")]:
            tensors[part] = wide(tensors[part]) * scale
        return StoredSAE(cfg, tensors)

    def save(self, sae: StoredSAE, path: Path) -> Path:
        """Write a new folder; a decoder bias that the class treats in another way moves into the encoder's."""
        path = path.resolve()
        if path.exists() and (not path.is_dir() or {file.name for file in path.iterdir()} - {WEIGHTS, CONFIG}):
            raise UserError(f"{path}: holds something else than an SAE; save into a new folder")
        name, state = _state(sae)
        cfg, k = sae.cfg, sae.cfg.k or (sae.cfg.training and sae.cfg.training.k)
        hook = re.match(r"blocks\.(\d+)\.", str(cfg.metadata.get("hook_name")))
        trainer = {
            "trainer_class": None,
            "dict_class": name,
            "activation_dim": cfg.d_in,
            "dict_size": cfg.d_sae,
            "k": k,
            "layer": cfg.metadata.get("layer", int(hook[1]) if hook else None),
            "lm_name": cfg.metadata.get("model_name"),
            "submodule_name": cfg.metadata.get("hook_name"),
        }
        if "group_sizes" in state:
            trainer["group_sizes"] = state["group_sizes"].tolist()
        with new_folder(path) as temporary:
            torch.save({part: tensor.cpu().contiguous().clone() for part, tensor in state.items()}, temporary / WEIGHTS)
            write_json(
                temporary / CONFIG, {"trainer": trainer, "buffer": {"ctx_len": cfg.metadata.get("context_size")}}
            )
        return path


FORMATS.register("dictionary_learning", DictionaryLearning(), __name__)


def _hook_name(trainer: Trainer) -> str | None:
    """The hook point as SAELens names it; submodules have names such as resid_post_layer_8."""
    if trainer.layer is None or (trainer.submodule_name or "").startswith("blocks."):
        return trainer.submodule_name
    site = (trainer.submodule_name or "resid_post").split("_layer_")[0]
    return f"blocks.{trainer.layer}.hook_{site}" if site in ("resid_post", "resid_pre") else trainer.submodule_name


def _agreed(cfg: InferenceConfig, weights: Archive, file: Path) -> InferenceConfig:
    """The configuration with the groups of the state dict, if config.json has none; UserError if K differs."""
    k, sizes = weights.tensors.get("k"), weights.tensors.get("group_sizes")
    if isinstance(k, Tensor) and k.ndim == 0 and not k.is_floating_point() and cfg.k not in (None, k.item()):
        raise UserError(f"{weights.path}: k = {k.item()}, but {file} has k = {cfg.k}: must be the same")
    if cfg.prefixes or not isinstance(sizes, Tensor) or sizes.ndim != 1:
        return cfg
    try:
        return replace(cfg, prefixes=tuple(sizes.cumsum(0).tolist()))
    except UserError as error:
        raise UserError(f"{weights.path}: {error}") from None


def _tensors(name: str, weights: Archive, d: int, m: int) -> dict[str, Tensor]:
    """Tensors of a class with the names and shapes of `SAE`."""
    if name in ("JumpReluAutoEncoder", "MatryoshkaBatchTopKSAE"):
        shapes = {"W_enc": (d, m), "b_enc": (m,), "W_dec": (m, d), "b_dec": (d,)}
        tensors = {part: weights.take(part, shape) for part, shape in shapes.items()}
    else:
        tensors = {"W_enc": weights.take("encoder.weight", (m, d)).T, "W_dec": weights.take("decoder.weight", (d, m)).T}
        if name == "GatedAutoEncoder":
            own = {"b_gate": "gate_bias", "r_mag": "r_mag", "b_mag": "mag_bias"}
            tensors |= {part: weights.take(theirs, (m,)) for part, theirs in own.items()}
        else:
            tensors["b_enc"] = weights.take("encoder.bias", (m,))
        bias = {"GatedAutoEncoder": "decoder_bias", "AutoEncoderNew": "decoder.bias"}.get(name, "b_dec")
        tensors["b_dec"] = weights.take(bias if bias in weights.tensors else "bias", (d,))
    if CLASSES[name] == "jumprelu":
        tensors["threshold"] = one_threshold(weights.take("threshold", (), (m,)))
    if name == "AutoEncoder":
        fold_decoder_norms_(tensors)  # as its own loader does
    return tensors


def _state(sae: StoredSAE) -> tuple[str, dict[str, Tensor]]:
    """The class that computes the same as the SAE, and its state dict."""
    cfg, tensors = sae.cfg, sae.tensors
    k = cfg.k or (cfg.training and cfg.training.k)
    if cfg.normalize_activations != "none" or cfg.architecture not in CLASSES.values():
        what = f"architecture = {cfg.architecture!r}, normalize_activations = {cfg.normalize_activations!r}"
        raise UserError(f"{what}: dictionary_learning has no such SAE")
    W_enc, W_dec, b_dec = (tensors[part] for part in ("W_enc", "W_dec", "b_dec"))
    batch = cfg.architecture == "jumprelu" and tensors["threshold"].ndim == 0 and k is not None
    subtracts = cfg.architecture in ("topk", "gated") or (batch and cfg.apply_b_dec_to_input)
    # What encoding adds to the pre-activations here, but not there.
    shift = (b_dec @ W_enc) * (int(subtracts) - int(cfg.apply_b_dec_to_input))
    linear = {"encoder.weight": W_enc.T, "decoder.weight": W_dec.T}
    if cfg.architecture == "gated":
        own = {"r_mag": tensors["r_mag"], "gate_bias": tensors["b_gate"] + shift, "decoder_bias": b_dec}
        return "GatedAutoEncoder", linear | own | {"mag_bias": tensors["b_mag"] + shift * tensors["r_mag"].exp()}
    b_enc = tensors["b_enc"] + shift
    if cfg.architecture == "standard":
        return "AutoEncoderNew", linear | {"encoder.bias": b_enc, "decoder.bias": b_dec}
    counts: dict[str, Tensor] = {"k": torch.tensor(k or 0, dtype=torch.int)}
    if cfg.architecture == "topk":
        unused = {"threshold": torch.tensor(UNTRAINED)}
        return "AutoEncoderTopK", linear | {"encoder.bias": b_enc, "b_dec": b_dec} | counts | unused
    plain: dict[str, Tensor] = {"W_enc": W_enc, "b_enc": b_enc, "W_dec": W_dec, "b_dec": b_dec}
    threshold = {"threshold": tensors["threshold"].float()}
    if not subtracts:
        return "JumpReluAutoEncoder", plain | {"threshold": wide(tensors["threshold"]).expand(cfg.d_sae)}
    if cfg.prefixes:
        sizes = torch.tensor([b - a for a, b in zip((0, *cfg.prefixes), cfg.prefixes, strict=False)])
        return "MatryoshkaBatchTopKSAE", plain | counts | threshold | {"group_sizes": sizes}
    return "BatchTopKSAE", linear | {"encoder.bias": b_enc, "b_dec": b_dec} | counts | threshold
