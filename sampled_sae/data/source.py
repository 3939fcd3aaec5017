"""Activations as users have them -> ActivationSource: tensors, arrays, files, caches, data sets, iterables, streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from sampled_sae.config import Config
from sampled_sae.data.cache import INDEX, open_cache
from sampled_sae.data.stream import (
    FLOATS,
    ActivationSource,
    ActivationStream,
    ArrayStream,
    Endless,
    EndlessStream,
    IterableStream,
    Rows,
    as_tensor,
    check_batch,
)
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.third_party import reason

NAME = "activations"  # of the only stream of a source without hook points
KINDS = "a tensor, an array, a path, a data set, an activation stream or an iterable of batches [N, d_in]"


def open_source(activations: Any, *, key: str | None = None, heldout: Any = None) -> ActivationSource:
    """Anything with activations -> a source that `train` opens. A source is returned as it is.

    `activations`: a tensor, array or memory map [N, d_in] or [N, L, d_in], a path (.npy, .safetensors, .pt, or the
    folder of a cache), a `datasets` column, a DataLoader or another iterable of batches, an `ActivationStream`, an
    `Endless` source, or several of these by name (a dictionary). `key` names the tensor in a file, or the column of a
    data set or of an iterable's items, that has several. `heldout` [n, d_in] replaces the tokens that are otherwise
    set aside; for several activations by name, it is a dictionary, too.
    """
    if isinstance(activations, ActivationSource):
        if heldout is not None:
            raise UserError(f"heldout: is not used with {type(activations).__name__}, which sets tokens aside itself")
        return activations
    if isinstance(activations, Mapping) and not _is_dataset(activations):
        if not activations:
            raise UserError("activations = {}: must hold at least one layer")
        parts = {name: _readable(each, key) for name, each in _by_name(activations).items()}
        return Source(parts, _held_out(heldout, list(parts)), key)
    path = str(activations) if isinstance(activations, str | Path) and heldout is None else None
    return Source({NAME: _readable(activations, key)}, _held_out(heldout, [NAME]), key, path)


def _by_name(given: Mapping[Any, Any]) -> dict[str, Any]:
    return {f"layer-{name}" if isinstance(name, int) else str(name): each for name, each in given.items()}


def _held_out(given: Any, names: list[str]) -> dict[str, Tensor] | None:
    """Held-out tokens [n, d_in] for each of the activations of these names; None if none are given."""
    if given is None:
        return None
    by_name = _by_name(given) if isinstance(given, Mapping) else dict.fromkeys(names[:1], given)
    if by_name.keys() != set(names):
        raise UserError(f"heldout: must be a dictionary of tensors [n, d_in], by name as activations: {names}")
    found = {name: check_batch(each, None, "heldout") for name, each in by_name.items()}
    if not all(map(len, found.values())):  # neither the inputs' scale nor the threshold could be determined
        raise UserError("heldout: holds no tokens; give some, or leave it out, so that some are set aside")
    return found


@dataclass(frozen=True, slots=True)
class FileOrigin(Config):
    """A file of activations, or a cache."""

    path: str
    key: str | None = None

    def reopen(self, device: str) -> ActivationSource:
        return open_source(self.path, key=self.key)


@dataclass(frozen=True)
class Source(ActivationSource):
    """Activations that need no language model, by name."""

    parts: Mapping[str, Any]
    """Rows, streams, Endless sources or iterables."""
    heldout: Mapping[str, Tensor] | None = None
    key: str | None = None
    """Name of the activations among the columns of an iterable's items."""
    path: str | None = None
    """The file or cache, if there is only one."""

    @property
    def origin(self) -> FileOrigin | None:
        return None if self.path is None else FileOrigin(self.path, self.key)

    def open(
        self, batch_size: int, heldout_tokens: int, seed: int, steps: int | None = None
    ) -> dict[str, ActivationStream]:
        wanted = heldout_tokens if self.heldout is None else 0
        opened = {name: _open(part, batch_size, wanted, seed, self.key) for name, part in self.parts.items()}
        for name, heldout in (self.heldout or {}).items():
            width, stream = heldout.shape[1], opened[name]
            if width != stream.d_in:
                raise UserError(f"heldout has width {width}: the activations have width {stream.d_in}")
            stream.heldout = heldout
        return opened


def _open(part: Any, batch_size: int, heldout_tokens: int, seed: int, key: str | None) -> ActivationStream:
    if isinstance(part, Rows):
        return ArrayStream(part, batch_size, heldout_tokens, seed)
    if isinstance(part, ActivationStream):
        if part.batch_size != batch_size:
            raise UserError(f"batch_size = {batch_size}: the stream of activations gives batches of {part.batch_size}")
        return part
    if isinstance(part, Endless):
        return EndlessStream(part, batch_size, heldout_tokens)
    return IterableStream(part, batch_size, heldout_tokens, key)


def _readable(activations: Any, key: str | None) -> Any:
    """What `_open` takes."""
    if isinstance(activations, str | Path):
        return load_activations(Path(activations), key)
    if isinstance(activations, Tensor):
        return TensorRows(activations)
    if isinstance(activations, np.ndarray):
        return ArrayRows(activations)
    if _is_dataset(activations):
        return _dataset(activations, key)
    if isinstance(activations, Rows | Endless | ActivationStream):
        return activations
    if callable(getattr(type(activations), "batch", None)):
        raise UserError(
            f"activations = {type(activations).__name__}: not a whole stream; inherit from "
            "sampled_sae.data.stream.ActivationStream and set d_in, batch_size and heldout"
        )
    if not isinstance(activations, Iterable):
        raise UserError(f"activations = {type(activations).__name__}: must be {KINDS}")
    return activations


class TensorRows(Rows):
    """A tensor [N, d_in] or [N, L, d_in] in memory, checked as a whole before any work."""

    def __init__(self, activations: Tensor):
        shape = as_tensor(activations, "activations").shape  # a nested tensor has no shape
        self.length, self.device = _check_shape(shape), activations.device
        self.tensor = check_batch(activations, None, "activations", self.row)
        self.shape = (len(self.tensor), self.tensor.shape[1])

    def take(self, rows: Tensor) -> Tensor:
        return self.tensor[rows.to(self.tensor.device)]


class ArrayRows(Rows):
    """An array or memory map [N, d_in] or [N, L, d_in], checked as it is read."""

    def __init__(self, activations: np.ndarray, modified: float | None = None):
        self.length = _check_shape(activations.shape)
        try:
            as_tensor(activations[:0], "activations")
        except UserError:
            raise UserError(f"activations are {activations.dtype} of shape {activations.shape}: {FLOATS}") from None
        self.array, self.modified = activations.reshape(-1, activations.shape[-1]), modified
        self.shape = (self.array.shape[0], self.array.shape[1])

    def take(self, rows: Tensor) -> Tensor:
        # A memory map is read from front to back, then put into the order wanted.
        ascending, order = rows.sort()
        return as_tensor(self.array[ascending.numpy()], "activations")[order.argsort()]


class ColumnRows(Rows):
    """A column of a `datasets.Dataset` with a vector in each row."""

    def __init__(self, dataset: Any, key: str):
        self.dataset, self.key = dataset.with_format("numpy", columns=[key]), key
        self.shape = (len(dataset), self.take(torch.zeros(1, dtype=torch.long)).shape[1])

    def take(self, rows: Tensor) -> Tensor:
        return as_column(self.dataset[rows.tolist()][self.key], self.key)


class ColumnBatches:
    """The same of a `datasets.IterableDataset`, in batches."""

    def __init__(self, dataset: Any, key: str):
        self.dataset, self.key = dataset, key

    def __iter__(self) -> Iterator[Tensor]:
        return (as_column(batch[self.key], self.key) for batch in self.dataset.iter(1024))


def as_column(values: Any, key: str) -> Tensor:
    """Rows of a column [n, d_in], as a list or an array, -> a tensor."""
    try:
        array = np.asarray(values, dtype=None if isinstance(values, np.ndarray) else np.float32)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.ndim != 2 or array.dtype == object:
        raise UserError(f"key = {key!r}: each row of the column must be a vector of the same width")
    return as_tensor(array, f"column {key!r}")


def _is_dataset(activations: Any) -> bool:
    """Whether it is an object of the package datasets, which need not be there."""
    return type(activations).__module__.split(".")[0] == "datasets"


def _dataset(dataset: Any, key: str | None) -> Any:
    if not isinstance(dataset.column_names, list):
        raise UserError("activations: a data set with several splits, or unknown columns; give one split")
    key = _chosen(key, dataset.column_names, "the data set has the columns")
    return ColumnRows(dataset, key) if hasattr(dataset, "__len__") else ColumnBatches(dataset, key)


def _chosen(key: str | None, names: list[Any], holder: str) -> Any:
    """The name of a column or tensor: the only one, or the one that was named."""
    if key is None and len(names) == 1:
        return names[0]
    if key not in names:
        raise UserError(f"key = {key!r}: {holder} {', '.join(map(str, names)) or 'nothing'}; name one of them")
    return key


def _check_shape(shape: tuple[int, ...]) -> int | None:
    """L of [N, L, d_in], None of [N, d_in]."""
    if len(shape) < 2 or shape[-1] < 1:
        raise UserError(f"activations have shape {tuple(shape)}: must be [N, d_in] or [N, L, d_in]")
    return shape[1] if len(shape) == 3 else None


# ---- files --------------------------------------------------------------------------------------------


def load_activations(path: Path, key: str | None = None) -> Rows:
    """The activations in a file, or in the folder of a cache; `key` names the tensor in a file that holds several."""
    if (path / INDEX).exists():
        return open_cache(path)
    if path.suffix not in READERS:
        raise UserError(
            f"activations = {str(path)!r}: must be a cache's folder or a file ending in {', '.join(READERS)}"
        )
    try:
        content, modified = READERS[path.suffix](path), path.stat().st_mtime
    # The readers are other libraries': a damaged file can fail anywhere in them.
    except Exception as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({reason(error)})"
        raise UserError(f"activations = {str(path)!r}: {what}") from None
    if isinstance(content, np.lib.npyio.NpzFile):
        raise UserError(f"activations = {str(path)!r}: an .npz archive; save the array alone with numpy.save")
    found = content[_chosen(key, list(content), f"{path} holds")] if isinstance(content, dict) else content
    if isinstance(found, np.ndarray):
        return ArrayRows(found, modified)
    if not isinstance(found, Tensor):
        raise UserError(f"activations = {str(path)!r}: holds a {type(found).__name__}; must be a tensor [N, d_in]")
    rows = TensorRows(found)
    rows.modified = modified
    return rows


_read_pt = partial(torch.load, map_location="cpu", weights_only=True)
READERS: dict[str, Callable[[Path], Any]] = {
    ".npy": partial(np.load, mmap_mode="r", allow_pickle=False),
    ".safetensors": load_file,
    ".pt": _read_pt,
    ".pth": _read_pt,
}
