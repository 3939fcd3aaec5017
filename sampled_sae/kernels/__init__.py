"""The fast path for NVIDIA GPUs: the same results as the plain one, up to rounding to bfloat16."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run here: float32 weights on a CUDA device that computes in bfloat16, with Triton."""
    if device.type != "cuda" or dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return compiles(device)


@cache
def compiles(device: torch.device) -> bool:
    """Whether a small kernel runs: Triton may be installed without the C compiler that it needs, for example."""
    from sampled_sae.kernels import gradients

    try:
        gradients.counts(torch.ones(1, 16, dtype=torch.bfloat16, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warnings.warn(f"Triton's kernels cannot be used on {device}, so steps are slower: {reason}", stacklevel=2)
        return False
    return True
