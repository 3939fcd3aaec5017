"""A score: the range of each latent's activations in the batch."""

from torch import Tensor

from sampled_sae.method.scores import register_score


@register_score("range")
def activation_range(Z: Tensor) -> Tensor:
    """Z [..., tokens, d_sae] -> [..., d_sae]."""
    return Z.amax(dim=-2) - Z.amin(dim=-2)
