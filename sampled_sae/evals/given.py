"""What every evaluation is given: SAEs of the model's width and of the layer at hand, and contexts of token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.sae import SAE

HOOK = re.compile(r"blocks\.(\d+)\.(?:\w+\.)?hook_(\w+)")
"""A place in a model as SAELens names it."""


def checked(saes: Sequence[SAE], model: LanguageModel, layer: int) -> Iterator[tuple[str, SAE]]:
    """Each SAE with a name for error lines; refuses none at all, one of another width or layer, and one with weights
    that are no numbers."""
    if not saes:
        raise UserError("saes = []: must name at least one SAE")
    for number, sae in enumerate(saes):
        which = "sae" if len(saes) == 1 else f"saes[{number}]"
        if sae.d != model.width:
            raise UserError(f"{which} has width {sae.d}: must be {model.width}, the width of {model.name}")
        own = own_layer(sae.metadata, which)
        if own not in (None, layer):
            place = f"layer {own}" if sae.metadata.get("layer") is not None else sae.metadata["hook_name"]
            raise UserError(f"layer = {layer}: {which} was trained on {place}; measure it there")
        for name in ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"):
            if not bool(getattr(sae, name).isfinite().all()):
                raise UserError(f"{which} has entries of {name} that are nan or infinite: must be finite numbers")
        yield which, sae


def own_layer(metadata: Mapping[str, Any], which: str) -> int | None:
    """After which layer an SAE reads the residual stream, by what it says of itself; none where it does not say."""
    if metadata.get("layer") is not None:
        return int(metadata["layer"])
    # SAEs from elsewhere have no layer, but the name of the place.
    hook = HOOK.fullmatch(str(metadata.get("hook_name")))
    if hook is None:
        return None
    if hook[2] not in ("resid_pre", "resid_post"):
        raise UserError(f"{which} was trained on {hook[0]}: only SAEs of the residual stream can be measured")
    return int(hook[1]) - (hook[2] == "resid_pre")


def check_contexts(contexts: Tensor, tokens: int = 1) -> None:
    """Refuse what are not token ids [n, L] of at least one context of at least so many tokens."""
    if contexts.ndim != 2 or contexts.is_floating_point() or not len(contexts) or contexts.shape[1] < tokens:
        raise UserError(
            f"contexts are {contexts.dtype} of shape {tuple(contexts.shape)}: must be token ids [n, L], at least one "
            f"context of at least {tokens} token{'s' * (tokens > 1)}"
        )
