"""The fast path for NVIDIA GPUs: the same results as the plain one, up to rounding to bfloat16."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch

from sampled_sae.method.config import SAEConfig
from sampled_sae.method.scores import get_score


def usable(device: torch.device, dtype: torch.dtype, config: SAEConfig | None = None, shards: int = 1) -> bool:
    """Whether the kernels run here: float32 weights on a CUDA device that computes in bfloat16, with Triton.

    With `config`, whether they train this SAE, with its latents over `shards` ranks. On a GPU where they do not, a
    warning gives the reason, once.
    """
    if device.type != "cuda":
        return False
    reason = obstacle(device, dtype) or (lacking(config, shards) if config is not None else "")
    if reason:
        warnings.warn(
            f"training on {device} without the GPU kernels, so steps are slower: {reason}", stacklevel=1
        )  # the same place: once
    return not reason


def lacking(config: SAEConfig, shards: int = 1) -> str:
    """Which setting of an SAE has no kernels, in words; empty if all have."""
    if config.jumprelu is not None and shards > 1:
        return "there are none for JumpReLU with latents over ranks"
    learns = config.pool.restricts and get_score(config.pool.score).learn is not None
    return f"there are none for the score {config.pool.score!r}, which learns from each step" if learns else ""


def obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels cannot run on a CUDA device with weights of this type; empty if they can."""
    if dtype != torch.float32:
        return f"they need float32 weights, got {str(dtype).removeprefix('torch.')}"
    if torch.version.hip is not None:
        return "they are written for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"they need compute capability 8.0 (bfloat16), {torch.cuda.get_device_name(device)} has " + ".".join(
            map(str, capability)
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return compile_error(device)


@cache
def compile_error(device: torch.device) -> str:
    """Why a small kernel does not run, empty if it does: Triton may lack the C compiler that it needs, for example."""
    from sampled_sae.kernels import masked

    try:
        masked.counts(torch.ones(1, 16, dtype=torch.bfloat16, device=device))
    except Exception as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ""
