"""Activations on disk: a .npy, .safetensors or .pt file, or the folder of a cache."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sampled_sae.data.cache import INDEX, open_cache
from sampled_sae.errors import UserError


def load_activations(path: Path, key: str | None = None) -> Any:
    """A tensor or memory map [N, d] or [N, L, d]; `key` names the tensor in a file that holds several."""
    readers: dict[str, Callable[[Path], Any]] = {
        ".npy": _read_npy,
        ".safetensors": load_file,
        ".pt": _read_pt,
        ".pth": _read_pt,
    }
    if (path / INDEX).exists():
        return open_cache(path)
    if path.suffix not in readers:
        raise UserError(
            f"activations = {str(path)!r}: must be a cache's folder or a file ending in {', '.join(readers)}"
        )
    try:
        content = readers[path.suffix](path)
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"activations = {str(path)!r}: cannot be read ({reason})") from None
    return _choose(content, path, key) if isinstance(content, dict) else content


def _read_npy(path: Path) -> Any:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _read_pt(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _choose(tensors: dict[str, Any], path: Path, key: str | None) -> Any:
    if key is None and len(tensors) == 1:
        return next(iter(tensors.values()))
    if key not in tensors:
        raise UserError(f"key = {key!r}: {path} holds {', '.join(tensors) or 'nothing'}; name one of them")
    return tensors[key]
