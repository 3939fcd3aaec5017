"""What every evaluation is given: SAEs of the model's width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sampled_sae.data.layers import LanguageModel
from sampled_sae.errors import UserError
from sampled_sae.sae import SAE


def checked(saes: Sequence[SAE], model: LanguageModel) -> Iterator[tuple[str, SAE]]:
    """Each SAE with a name for error lines; refuses none at all, and one of another width."""
    if not saes:
        raise UserError("saes = []: must name at least one SAE")
    for number, sae in enumerate(saes):
        which = "sae" if len(saes) == 1 else f"saes[{number}]"
        if sae.d != model.width:
            raise UserError(f"{which} has width {sae.d}: must be {model.width}, the width of {model.name}")
        yield which, sae
