"""Where a run computes."""

from __future__ import annotations

import torch

from sampled_sae.errors import UserError


def usable_device(name: str | torch.device | None) -> torch.device:
    """The device of that name if it is there; by default the GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0]
        raise UserError(f"device = {str(name)!r}: cannot be used ({reason})") from None
    return device
