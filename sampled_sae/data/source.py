"""Activations on disk: a .npy, .safetensors or .pt file, or the folder of a cache."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sampled_sae.data.cache import INDEX, open_cache
from sampled_sae.data.stream import ArrayStream, Endless, EndlessStream, IterableStream, Stored, Stream, check_batch
from sampled_sae.utils.errors import UserError


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


def open_stream(
    activations: Any, batch_size: int, heldout_tokens: int, seed: int, heldout: Any | None = None
) -> Stream:
    """Wrap a tensor, an array or memory map, an endless source or an iterable of batches; a stream stays one.

    `heldout` gives held-out tokens of one's own; otherwise they are taken from the activations.
    """
    own = None if heldout is None else check_batch(heldout, None, "heldout")
    wanted = 0 if own is not None else heldout_tokens
    stream: Stream
    if isinstance(activations, (Tensor, np.ndarray, Stored)):
        stream = ArrayStream(activations, batch_size, wanted, seed)
    elif isinstance(activations, Stream):
        stream = activations
        size = getattr(stream, "batch_size", batch_size)
        if size != batch_size:
            raise UserError(f"batch_size = {batch_size}: the stream of activations gives batches of {size}")
    elif isinstance(activations, Endless):
        stream = EndlessStream(activations, batch_size, wanted)
    elif isinstance(activations, Iterable):
        stream = IterableStream(activations, batch_size, wanted)
    else:
        raise UserError(
            f"activations = {type(activations).__name__}: must be a tensor, an array or an iterable of [B, d] batches"
        )
    if own is not None:
        if own.shape[1] != stream.width:
            raise UserError(f"heldout has width {own.shape[1]}: the activations have width {stream.width}")
        stream.heldout = own
    return stream
