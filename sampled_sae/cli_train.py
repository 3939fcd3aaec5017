"""`sampled-sae train`: from a file of activations, or from a language model and a text, to SAEs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import tyro

from sampled_sae import presets
from sampled_sae.cli_source import Source
from sampled_sae.config import AuxKConfig, OptimizerConfig, SAEConfig, sae_config_from_dict
from sampled_sae.errors import UserError
from sampled_sae.files import read_json
from sampled_sae.scores import get_score, load_scores

Method = Literal["batchtopk", "topk", "topk_then_batchtopk", "sampled", "released", "annealed"]

USUAL: dict[str, Any] = {
    **{"latents": 16_384, "k": 32, "methods": ("batchtopk",), "scores": None, "l": (5.0,), "lr": 3e-4},
    **{"batch_size": 4096, "steps": None, "tokens": None},
}
PAPER: dict[str, Any] = USUAL | {
    **{"tokens": 25_000_000, "latents": 65_536, "k": 60, "methods": ("batchtopk", "sampled")},
    **{"scores": ("l2", "squared_l2", "entropy", "uniform"), "l": (1, 3, 4, 5, 10, 20, 30, 40, 50, 60, 70, 100)},
}
PRESETS = {"paper": PAPER, "paper-50k": PAPER | {"tokens": None, "steps": 50_000}}
PYTHIA: dict[str, Any] = {
    **{"model": "EleutherAI/pythia-160m-deduped", "layer": (6,), "text": "monology/pile-uncopyrighted"},
    **{"context": 1024, "max_norm": float("inf")},
}
SOURCES: dict[str | None, dict[str, Any]] = {
    **{None: {"context": 1024, "max_norm": 10.0}, "paper": PYTHIA, "paper-50k": PYTHIA}
}


@dataclass(frozen=True)
class Train:
    """Train SAEs, all of them in one pass: on activations in a file, or on those of a language model on a text."""

    out: Path
    """Folder for the SAEs, the log and the checkpoints."""
    activations: tyro.conf.Positional[Path | None] = None
    """A .npy, .safetensors or .pt file with a tensor [N, d] or [N, L, d]; or name a model instead."""
    preset: Literal["paper", "paper-50k"] | None = None
    """The paper's real experiment, all 49 SAEs: on 25M tokens, or for its other reading, 50,000 steps."""
    source: Annotated[Source, tyro.conf.arg(name="")] = field(default_factory=Source)
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
        configs, steps = self._configs(chosen), self._steps(chosen)
        folders = train_in_passes(
            self._opener(chosen.batch_size),
            configs,
            self.out,
            steps=steps,
            batch_size=chosen.batch_size,
            seed=self.seeds[0],
            resume=self.resume,
            device=self.device,
            normalize=self.normalize,
            heldout_tokens=self.source.heldout_tokens,
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
        return SimpleNamespace(**values | asked)

    def _steps(self, chosen: SimpleNamespace) -> int:
        from sampled_sae.data.harvest import tokens_to_steps

        if (chosen.steps is None) == (chosen.tokens is None):
            raise UserError(f"steps = {chosen.steps}, tokens = {chosen.tokens}: give one of the two")
        return chosen.steps if chosen.tokens is None else tokens_to_steps(chosen.tokens, chosen.batch_size)

    def _opener(self, batch_size: int) -> Callable[[], Any]:
        """Opens the activations, once for each pass."""
        from sampled_sae.data.files import load_activations

        path = self.activations
        if path is None:
            source = self.source.or_else(SOURCES[self.preset])
            return source.opener(batch_size, self.seeds[0], self.device)
        if self.source.model is not None:
            raise UserError(f"activations = {str(path)!r} and model = {self.source.model!r}: give one of the two")
        return lambda: load_activations(path, self.key)

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
