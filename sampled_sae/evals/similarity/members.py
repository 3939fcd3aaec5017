"""The SAEs of a comparison: what each was trained as, its decoder when asked for, and what was found out about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sampled_sae.config import SAEConfig, sae_config_from_dict, to_dict
from sampled_sae.errors import UserError
from sampled_sae.evals.firing import Liveness, load_live
from sampled_sae.evals.session import find_saes, names_of
from sampled_sae.files import read_json
from sampled_sae.presets import label
from sampled_sae.sae import SAE

EXPLANATIONS = Path("evals") / "explanations.json"
WEIGHTS = "sae_weights.safetensors"
ORIGIN = ("model_name", "hook_name", "layer", "text", "context_size", "prepend_bos", "skip_first")
"""What an SAE says about its activations; two seeds of one configuration agree in it."""
UNKNOWN = Liveness(None, "nobody said which latents fire")
TRAINING = ("steps", "batch_size", "normalize")


class Explained(NamedTuple):
    """What a latent stands for, by an explainer."""

    text: str
    """One short sentence."""
    score: float | None
    """Its interpretability score; none if it was not scored."""


@dataclass(frozen=True)
class Member:
    """One SAE of a comparison; its weights are read only while they are compared."""

    name: str
    """Its folder, or another name that no other member has."""
    latents: int
    """Number of latents m."""
    width: int
    """Input width d."""
    decoder: Callable[[], Tensor]
    """Reads the decoder's rows [m, d]."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """All that decides the outcome but the seed, flat; empty for an SAE that does not say."""
    kind: str | None = None
    """Short name of the configuration."""
    seed: int | None = None
    """Seed of the start values."""
    data_seed: int | None = None
    """Seed of the order of the data."""
    live: Liveness = UNKNOWN
    """Which latents fire."""
    explained: dict[int, Explained] = field(default_factory=dict)
    """Explanations by latent."""


def member_of(
    sae: SAE, name: str, live: Liveness | None = None, explained: dict[int, Explained] | None = None
) -> Member:
    """An SAE in memory as a member."""
    said = _described(sae.config, sae.metadata)
    return Member(
        name, sae.m, sae.d, lambda: sae.W_dec.detach(), **said, live=live or UNKNOWN, explained=explained or {}
    )


def open_members(folders: Iterable[Path | str]) -> list[Member]:
    """The SAEs of these folders, or of the runs there, each once, in order, under names that tell them apart."""
    found = list(dict.fromkeys(folder.resolve() for folder in find_saes([Path(folder) for folder in folders])))
    return [open_member(folder, name) for folder, name in zip(found, names_of(found), strict=True)]


def open_member(folder: Path, name: str | None = None) -> Member:
    """A saved SAE, with what evaluations have left in its folder; any SAELens folder with a decoder will do."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            shape = file.get_slice("W_dec").get_shape()
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged ({error})") from None
    if len(shape) != 2:
        raise UserError(f"{path}: W_dec has shape {tuple(shape)}: must be [latents, width]")
    m, width = shape

    def decoder() -> Tensor:
        with safe_open(path, "pt") as file:
            rows: Tensor = file.get_tensor("W_dec")
        return rows

    said = _described(*_configuration(folder))
    return Member(
        name or folder.name, m, width, decoder, **said, live=load_live(folder, m), explained=_explained(folder, m)
    )


def top_features(explained: dict[int, Explained], count: int = 10) -> list[tuple[int, Explained]]:
    """The latents of the best scores with their explanations, best first; those without a score are left out."""
    scored = [(latent, item) for latent, item in explained.items() if item.score is not None]
    return sorted(scored, key=lambda pair: (-(pair[1].score or 0.0), pair[0]))[:count]


def _configuration(folder: Path) -> tuple[SAEConfig | None, dict[str, Any]]:
    path = folder / "sampled_sae.json"
    if not path.exists():
        return None, {}
    own = read_json(path)
    try:
        config, metadata = own["config"], own["metadata"]
    except (KeyError, TypeError):
        raise UserError(f"{path}: not a configuration of this program") from None
    return None if config is None else sae_config_from_dict(config), dict(metadata or {})


def _described(config: SAEConfig | None, metadata: dict[str, Any]) -> dict[str, Any]:
    """What groups SAEs: everything but seeds and names, and the seeds apart."""
    if config is None:
        return {}
    plain = to_dict(config)
    seed = plain.pop("seed")
    plain.pop("name")
    training = metadata.get("training") or {}
    origin = {name: metadata.get(name) for name in ORIGIN} | {name: training.get(name) for name in TRAINING}
    return {
        "configuration": _flat(plain) | origin,
        "kind": label(config),
        "seed": seed,
        "data_seed": training.get("seed"),
    }


def _flat(plain: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat


def key_of(configuration: dict[str, Any]) -> str:
    """The same text for the same configuration."""
    return json.dumps(configuration, sort_keys=True, default=str)


def _explained(folder: Path, m: int) -> dict[int, Explained]:
    path = folder / EXPLANATIONS
    if not path.exists():
        return {}
    from sampled_sae.evals.explanations import load_explanations

    texts, latents = load_explanations(folder), read_json(path)["latents"]
    outside = [latent for latent in texts if latent >= m]
    if outside:
        raise UserError(f"{path}: explains latent {outside[0]}: the SAE has {m}; is the file another SAE's?")
    scores = {int(latent): _score(entry, path) for latent, entry in latents.items()}
    return {latent: Explained(text, scores[latent]) for latent, text in sorted(texts.items())}


def _score(entry: Any, path: Path) -> float | None:
    score = entry.get("score") if isinstance(entry, dict) else None
    if score is None:
        return None
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise UserError(f"{path}: score = {score!r}: must be a number, or null")
    return float(score)
