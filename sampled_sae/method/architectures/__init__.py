"""SAE architectures for inference: how pre-activations become codes. A new architecture is a file in this folder:

    class Absolute(Architecture):
        def activate_(self, sae, pre, latents):
            return pre.abs_()

    ARCHITECTURES.register("absolute", Absolute(), __name__)

Architectures of other packages are found through the entry point `sampled_sae.architectures`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from sampled_sae.config import Config, Positive, require
from sampled_sae.method.config import SAEConfig, check_prefixes
from sampled_sae.utils.registry import Registry


class Architecture(ABC):
    """One architecture, registered under the name that SAELens has for it in cfg.json."""

    tensors: tuple[str, ...] = ("b_enc",)
    """Tensors [d_sae] beyond W_enc, W_dec and b_dec, with their names in SAELens."""
    per_latent: bool = True
    """Whether a latent's code depends on its own pre-activation alone."""
    needs_k: bool = False
    """Whether `InferenceConfig.k` decides the codes."""

    @abstractmethod
    def activate_(self, sae: Any, pre: Tensor, latents: Tensor | slice | None) -> Tensor:
        """Pre-activations [n, c] of latents, [c] or a slice (None: all), -> codes [n, c]; `pre` may be overwritten."""


ARCHITECTURES: Registry[Architecture] = Registry("architecture", __name__, "sampled_sae.architectures")


def pick(tensor: Tensor, latents: Tensor | slice | None) -> Tensor:
    """Entries of a tensor [d_sae] for the given latents [c], or all."""
    return tensor if latents is None else tensor[latents]


@dataclass(frozen=True, slots=True)
class InferenceConfig(Config):
    """What an SAE is, besides its tensors."""

    d_in: Positive
    """Width of the activations."""
    d_sae: Positive
    """Number of latents."""
    architecture: str = "jumprelu"
    """How pre-activations become codes."""
    k: Positive | None = None
    """Active latents per token: exactly for topk; None if unknown or not fixed."""
    apply_b_dec_to_input: bool = True
    """Whether b_dec is subtracted from the input before encoding."""
    normalize_activations: Literal["none", "constant_norm_rescale", "layer_norm"] = "none"
    """How each token is normalized before encoding: not at all, to the norm sqrt(d_in), or to mean 0 and variance 1."""
    prefixes: tuple[Positive, ...] = ()
    """Widths of the nested prefixes of a Matryoshka SAE, ascending up to d_sae; empty for other SAEs."""
    training: SAEConfig | None = None
    """Settings of the training; None for an SAE trained elsewhere."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Origin of the SAE: model, hook point, text, training run. Saved with it."""

    def check(self) -> None:
        check_prefixes(self.prefixes, self.d_sae)
        needs_k = ARCHITECTURES.find(self.architecture).needs_k
        require(not needs_k or self.k is not None, "k", self.k, f"must be a number for {self.architecture!r} SAEs")
