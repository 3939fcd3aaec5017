"""The fast path for NVIDIA GPUs: the same results as the plain one, up to rounding to bfloat16."""

from __future__ import annotations

import importlib.util

import torch


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run here: float32 weights on a CUDA device that computes in bfloat16, with Triton."""
    if device.type != "cuda" or dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
