"""`sampled-sae train`: from a file of activations, or from a language model and a text, to SAEs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from sampled_sae.cli.cache import Source
from sampled_sae.config import read_file, require
from sampled_sae.formats import describe
from sampled_sae.method import presets
from sampled_sae.method.config import AuxKConfig, OptimizerConfig, SAEConfig
from sampled_sae.method.scores import get_score, load_scores
from sampled_sae.utils.errors import UserError

if TYPE_CHECKING:
    from sampled_sae.data.stream import ActivationSource

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
POOLED = ("sampled", "released", "annealed")
USED_BY: dict[str, tuple[str, ...]] = {
    **{"scores": POOLED, "l": ("sampled",), "pick": ("sampled",), "fraction": ("released", "annealed")},
    **{"at": ("topk_then_batchtopk", "released", "annealed")},
}
"""Settings that not every method has."""
IN_CONFIGS = ("latents", "k", "methods", *USED_BY, "lr", "dead_after")
"""Settings that a file of configurations holds itself."""


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
        from sampled_sae.training.trainer import train_in_passes

        for script in self.load_scores:
            load_scores(script)
        chosen = self._chosen()
        if not self.seeds or not chosen.methods:
            raise UserError("methods and seeds: each must name at least one")
        require(chosen.batch_size >= 1, "batch_size", chosen.batch_size, "must be at least 1")
        self._refuse_unused(chosen)
        configs, steps = self._configs(chosen), self._steps(chosen)
        for name in dict.fromkeys(presets.label(config) for config in configs if config.holds_all):
            print(f"{name}: its pool holds all latents, so it is BatchTopK", file=sys.stderr)
        folders = train_in_passes(
            self._source(),
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
            # Folders alone on stdout, for whoever reads them there.
            if line := _how_well(folder):
                print(line, file=sys.stderr)
            print(folder, flush=True)

    def _chosen(self) -> SimpleNamespace:
        """What was asked for, and the preset's or the usual value where nothing was."""
        values = USUAL if self.preset is None else PRESETS[self.preset]
        asked = {name: getattr(self, name) for name in values if getattr(self, name) is not None}
        if "steps" in asked or "tokens" in asked:  # instead of the preset's length, whichever way it is given
            values = values | {"steps": None, "tokens": None}
        return SimpleNamespace(**values | asked)

    def _refuse_unused(self, chosen: SimpleNamespace) -> None:
        """A setting that was given and that nothing uses is a mistake, not something to pass over."""
        for name in given(self, IN_CONFIGS) if self.configs is not None else ():
            raise unused(self, name, f"with --configs {self.configs}: set it in that file")
        if self.configs is not None and len(self.seeds) > 1:
            raise unused(self, "seeds", f"with --configs {self.configs}: give one, and set the SAEs' own in that file")
        for name in given(self, tuple(USED_BY)):
            users = USED_BY[name]
            if not set(users) & set(chosen.methods):
                what = f"by --methods {' '.join(chosen.methods)}: it is for {', '.join(users)}"
                raise unused(self, name, what)
        path = self.activations
        if path is None:
            for name in given(self, ("key",)):
                raise unused(self, name, "with --model: it is for a file of activations")
            return
        if self.source.model is not None:
            raise UserError(f"activations = {str(path)!r} and model = {self.source.model!r}: give one of the two")
        for name in given(self.source, tuple(f.name for f in fields(Source) if f.name != "heldout_tokens")):
            raise unused(self.source, name, f"with the activations in {path}: it is for --model")
        if self.key is not None and (path.suffix == ".npy" or path.is_dir()):
            raise unused(self, "key", f"with {path}: it is for a file that holds several tensors")

    def _steps(self, chosen: SimpleNamespace) -> int:
        from sampled_sae.data.harvest import tokens_to_steps

        if (chosen.steps is None) == (chosen.tokens is None):
            raise UserError(f"steps = {chosen.steps}, tokens = {chosen.tokens}: give one of the two")
        return chosen.steps if chosen.tokens is None else tokens_to_steps(chosen.tokens, chosen.batch_size)

    def _source(self) -> ActivationSource:
        from sampled_sae.data.source import open_source

        if self.activations is None:
            return self.source.or_else(SOURCES[self.preset]).activations(self.device)
        return open_source(self.activations, key=self.key)

    def _configs(self, chosen: SimpleNamespace) -> list[SAEConfig]:
        if self.configs is not None:
            plain = read_file(self.configs, "configs").get("saes")
            if not isinstance(plain, list):
                raise UserError(f"{self.configs}: must hold a list of SAE configurations")
            return [SAEConfig.from_dict(item, f"{self.configs}: saes[{i}]") for i, item in enumerate(plain)]
        shared: dict[str, Any] = {
            "optimizer": OptimizerConfig(lr=chosen.lr),
            "auxk": AuxKConfig(dead_after=self.dead_after),
        }
        made: list[SAEConfig] = []
        for method in chosen.methods:
            made += self._of_method(method, chosen, shared)
        return [replace(config, seed=seed) for config in made for seed in self.seeds]

    def _of_method(self, method: str, chosen: SimpleNamespace, shared: dict[str, Any]) -> list[SAEConfig]:
        size: dict[str, Any] = {"d_sae": chosen.latents, "k": chosen.k, **shared}
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


def _how_well(folder: Path) -> str:
    """What training says of the SAE that it left there."""
    training = describe(folder).metadata.get("training", {})
    measured = training.get("heldout") or {}
    shown = [f"{name} {measured[key]:.3g}" for key, name in (("fvu", "FVU"), ("l0", "L0")) if measured.get(key)]
    return f"{folder.name}: {', '.join(shown)} on held-out tokens, {training['dead']:.1%} dead" if shown else ""


def given(settings: Any, names: tuple[str, ...]) -> list[str]:
    """Those of the fields that have another value than if nothing had been said."""
    usual = {item.name: item.default for item in fields(settings)}
    return [name for name in names if getattr(settings, name) != usual[name]]


def unused(settings: Any, name: str, why: str) -> UserError:
    """One line on a flag that nothing uses."""
    value = getattr(settings, name)
    listed = value if isinstance(value, tuple) else () if value is True else (value,)
    words = " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in listed)
    return UserError(f"--{name.replace('_', '-')} {words}".rstrip() + f" is not used {why}")
