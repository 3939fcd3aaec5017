"""Activations for benchmarks/quality.py: tokenized text, the same batches for every toolkit, held-out sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from quality_runs import Setting
from torch import Tensor

from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.stream import ActivationStream
from sampled_sae.data.text import TextSource
from sampled_sae.models.language_model import LanguageModel

USED = 0.98  # share of a block's tokens in its batches; the rest may be left out for their norm
Texts = dict[str, np.ndarray[Any, Any]]  # token ids [n, context] by name: train, calibration, select, report, wide


def tokenize(model: LanguageModel, setting: Setting, texts: Sequence[str | None], path: Path) -> Texts:
    """Contexts of the text of training and, where given, of the texts to select and report on; kept in `path`.

    Without the latter two, the first contexts of the first text are held out for them. With the last, `wide` are
    twice as many contexts as `report`, spread over the rest of it.
    """
    train = blocks(setting) * per_block(setting)
    if path.exists():
        found = dict(np.load(path))
        if len(found["train"]) >= train or "train_is_all" in found:
            return found

    def read(text: str, most: int | None) -> np.ndarray[Any, Any]:
        source = contexts(TextSource(text).documents(), model.tokenizer, TextConfig(setting.context, bos=model.bos))
        return np.stack([c.numpy().astype(np.int32) for c in islice(source, most)])

    text, select, report = texts
    assert text is not None
    held = {"calibration": setting.calibration}
    held |= {} if select else {"select": setting.select}
    held |= {} if report else {"report": setting.report}
    whole = read(text, sum(held.values()) + train)
    found, taken = {}, 0
    for name, count in held.items():
        found[name] = whole[taken : taken + count]
        taken += count
    found["train"] = whole[taken:]
    if len(found["train"]) < train:
        found["train_is_all"] = np.ones(())
    if select:
        other = read(select, None)
        found["select"] = other[np.linspace(0, len(other) - 1, setting.select).astype(int)]
    if report:
        other = read(report, None)
        found["report"] = other[: setting.report]
        found["wide"] = other[np.linspace(setting.report, len(other) - 1, 2 * setting.report).astype(int)]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **found)  # type: ignore[arg-type]
    temporary.replace(path)
    return found


def per_block(setting: Setting) -> int:
    """Contexts that are shuffled together."""
    return setting.buffer_tokens // setting.context


def block_rows(setting: Setting) -> int:
    """Tokens of one block's batches."""
    return int(per_block(setting) * setting.context * USED) // setting.batch * setting.batch


def blocks(setting: Setting) -> int:
    """Blocks for all batches of a run."""
    return -(-(setting.tokens // setting.batch * setting.batch) // block_rows(setting))


class Data(NamedTuple):
    """Activations of one layer."""

    train: Tensor
    """[tokens, d_in]: all batches in their order, in the model's dtype."""
    file: Path | None
    """The file that `train` is mapped from."""
    sets: dict[str, Tensor]
    """Held-out tokens [n, d_in] in float32."""
    limit: float
    """Tokens with a higher norm are left out everywhere."""


def norms(x: Tensor) -> Tensor:
    return torch.cat([part.float().norm(dim=1) for part in x.split(2**16)])


@torch.no_grad()
def harvest(model: LanguageModel, setting: Setting, texts: Texts, folder: Path | None) -> Data:
    """Run the model over the contexts. With a folder, the activations are a file there, which a second call maps."""

    def read(tokens: np.ndarray[Any, Any]) -> Tensor:
        at_once = max(1, (2**16 if model.device.type == "cuda" else 2**12) // setting.context)
        parts = [torch.from_numpy(tokens[i : i + at_once].astype(np.int64)) for i in range(0, len(tokens), at_once)]
        return torch.cat([model.activations(part, [setting.layer])[setting.layer].flatten(0, 1) for part in parts])

    rows, count = block_rows(setting), blocks(setting)
    shape, dtype = (count * rows, model.width), model.dtype
    size = shape[0] * shape[1]
    name = f"{Path(setting.model).name}-layer{setting.layer}-{setting.context}-{shape[0]}x{shape[1]}"
    name += f"-norm{setting.high_norm_factor:g}"
    path = None if folder is None else folder / f"{name}.bin"
    if path is not None and path.exists():  # written last
        saved = dict(np.load(path.with_suffix(".npz")))
        limit = float(saved.pop("limit"))
        sets = {name: torch.from_numpy(x).to(model.device) for name, x in saved.items()}
        return Data(torch.from_file(str(path), False, size, dtype=dtype).view(shape), path, sets, limit)
    held = read(texts["calibration"])
    limit = setting.high_norm_factor * float(norms(held).median())

    def normal(x: Tensor) -> Tensor:
        return x[norms(x) <= limit].float()

    sets = {name: normal(read(texts[name])) for name in ("select", "report", "wide") if name in texts}
    sets["calibration"] = normal(held)
    if path is None:
        x = torch.empty(shape, dtype=dtype, device=model.device)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: x.cpu().numpy() for name, x in sets.items()}
        np.savez(path.with_suffix(".npz"), limit=np.float64(limit), **arrays)  # type: ignore[arg-type]
        x = torch.from_file(f"{path}.tmp", True, size, dtype=dtype).view(shape)
    each, there = per_block(setting), texts["train"]
    for block in range(count):
        # A text that is too short is read again.
        chosen = np.arange(block * each, (block + 1) * each) % len(there)
        stream = read(there[chosen])
        kept = (norms(stream) <= limit).nonzero()[:, 0]
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(block)).to(kept.device)
        while len(order) < rows:  # more high norms than usual: some tokens are used twice
            order = torch.cat([order, order])
        x[block * rows : (block + 1) * rows] = stream[kept[order[:rows]]]
    if path is not None:
        Path(f"{path}.tmp").replace(path)
    return Data(x, path, sets, limit)


class Batches(ActivationStream):
    """The same batches for `ss.train`."""

    def __init__(self, data: Data, batch_size: int):
        self.x, self.batch_size, self.d_in = data.train, batch_size, data.train.shape[1]
        self.heldout = data.sets["calibration"]

    def batch(self, index: int) -> Tensor:
        return self.x[index * self.batch_size : (index + 1) * self.batch_size]
