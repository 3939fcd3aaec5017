"""SAE architectures for inference, one file each: how pre-activations become codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import Tensor

from sampled_sae.method.config import SAEConfig
from sampled_sae.utils.errors import UserError


class Architecture(ABC):
    """One architecture. Its file assigns an instance to `ARCHITECTURE`."""

    name: str
    """As SAELens spells it in cfg.json."""
    tensors: tuple[str, ...] = ("b_enc",)
    """Tensors [d_sae] beyond W_enc, W_dec and b_dec, with their names in SAELens."""
    per_latent: bool = True
    """Whether a latent's code depends on its own pre-activation alone."""
    needs_k: bool = False
    """Whether `InferenceConfig.k` decides the codes."""

    @abstractmethod
    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | None) -> Tensor:
        """Pre-activations [n, c] of the given latents [c] (None: all) -> codes [n, c]; `pre` may be overwritten."""


def pick(tensor: Tensor, latents: Tensor | None) -> Tensor:
    """Entries of a tensor [d_sae] for the given latents [c], or all."""
    return tensor if latents is None else tensor[latents]


@cache
def architectures() -> dict[str, Architecture]:
    """All architectures by name."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    return {module.ARCHITECTURE.name: module.ARCHITECTURE for module in modules}


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """What an SAE is, besides its tensors."""

    d_in: int
    """Width of the activations."""
    d_sae: int
    """Number of latents."""
    architecture: str = "jumprelu"
    """How pre-activations become codes: a name in `architectures()`."""
    k: int | None = None
    """Active latents per token: exactly for topk; None if unknown or not fixed."""
    apply_b_dec_to_input: bool = True
    """Whether b_dec is subtracted from the input before encoding."""
    training: SAEConfig | None = None
    """Settings of the training; None for an SAE trained elsewhere."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Origin of the SAE: model, hook point, text, training run. Saved with it."""

    def __post_init__(self) -> None:
        known = architectures()
        if self.architecture not in known:
            raise UserError(f"architecture = {self.architecture!r}: must be one of {', '.join(sorted(known))}")
        if known[self.architecture].needs_k and self.k is None:
            raise UserError(f"k = None: must be a number for architecture {self.architecture!r}")
