"""`sampled-sae train`: from activations, or from a language model and a text, to SAEs; `resume` continues it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from sampled_sae.cli.cache import Collect, Source
from sampled_sae.cli.help import heading, rows
from sampled_sae.config import PositiveNumber, read_file
from sampled_sae.experiments.stages import words
from sampled_sae.method.config import AuxKConfig, InitConfig, OptimizerConfig, SAEConfig, ThresholdConfig
from sampled_sae.method.presets import DEFAULT_METHODS, PAPER_INIT, PAPER_OPTIMIZER, parameters, parse_methods
from sampled_sae.method.presets import PRESETS as METHODS
from sampled_sae.sae import SAE
from sampled_sae.training.settings import InputNorm, TrainConfig
from sampled_sae.utils.errors import UserError

IN_CONFIGS = ("d_sae", "k", "methods", "optimizer", "init", "auxk", "threshold")
"""Settings that a file of configurations contains."""


COMMON = ("d_sae", "k", "lr", "prefixes")
"""Parameters that every method has."""
SHARED = ("batch_size", "input_norm", "heldout_tokens", "log_every", "checkpoint_every", "log_to")
"""Settings that all SAEs of a run share."""


@dataclass(frozen=True, slots=True)
class Optimizer(OptimizerConfig):
    """Adam, its learning rate over time, and the scale of the gradient."""

    lr: Annotated[PositiveNumber | None, tyro.conf.arg(aliases=("--lr",))] = None
    """Peak learning rate. Default: computed from d_in, d_sae, K, batch size and steps."""


@dataclass(frozen=True)
class Train:
    """Train SAEs on the same batches: on activations in a file, or on those of a language model on a text."""

    out: Path
    """Folder for the SAEs, the log and the checkpoints."""
    activations: tyro.conf.Positional[Path | None] = None
    """A .npy, .safetensors or .pt file with a tensor [N, d_in] or [N, L, d_in], or a cache; or give --model, --text and
    --layer."""
    preset: Literal["paper", "paper-50k"] | None = None
    """The paper's experiment, all 49 SAEs: on 25M tokens, or for 50,000 steps. Other flags replace its values."""
    tokens: int | None = None
    """Tokens to train on; give this or --steps."""
    steps: int | None = None
    """Optimizer steps; give this or --tokens."""
    d_sae: Annotated[int, tyro.conf.arg(aliases=("--latents",))] = 16_384
    """Latents of each SAE."""
    k: int = 32
    """Mean active latents per token."""
    methods: tuple[str, ...] = DEFAULT_METHODS
    """batchtopk, topk, topk_then_batchtopk, matryoshka, jumprelu, sampled, released or annealed, each with parameters
    after a colon; `/` separates alternatives: sampled:score=l2/entropy,l=5/30."""
    seeds: tuple[int, ...] = (0,)
    """Train each SAE once with each seed."""
    configs: Path | None = None
    """A JSON file with a list of SAE configurations, which replaces methods and their settings."""
    batch_size: int = 4096
    """Tokens per step."""
    heldout_tokens: int = 65_536
    """Tokens held out of training; they determine the input scale and calibrate the threshold."""
    input_norm: InputNorm = "sqrt_d_in"
    """Root mean square norm that inputs are scaled to in training; saved SAEs take raw activations."""
    log_every: int = 50
    """Steps between log lines."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. Default: 1,000, and at least a minute apart."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Send the log there too."""
    resume: bool = False
    """Continue from the last checkpoint in --out."""
    dry_run: bool = False
    """Print estimates of time, memory, disk and tokens; no weights are loaded."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the GPU, if there is one."""
    divide: str = "auto"
    """Under torchrun, how its processes share the work: saes, latents, or both as in 2x4 (groups of SAEs x parts of
    latents)."""
    key: str | None = None
    """Name of the tensor in a file that holds several."""
    load_scores: tuple[Path, ...] = ()
    """Python files that register custom scores."""
    collect: Annotated[Collect, tyro.conf.arg(name="")] = field(default_factory=Collect)
    optimizer: Optimizer = field(default_factory=Optimizer)
    init: InitConfig = field(default_factory=InitConfig)
    auxk: AuxKConfig = field(default_factory=AuxKConfig)
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)

    GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "Activations": (
            *("activations", "key", "model", "text", "layer", "hook", "context"),
            *("text_field", "split", "subset", "model_dtype"),
        ),
        "SAEs": ("methods", "d_sae", "k", "seeds", "lr", "configs", "preset", "load_scores"),
        "Run": (
            *("out", "tokens", "steps", "batch_size", "heldout_tokens", "input_norm"),
            *("device", "divide", "resume", "dry_run"),
        ),
        "Log": ("log_every", "checkpoint_every", "log_to"),
    }
    EXAMPLES: ClassVar[Sequence[str]] = (
        "acts.npy --tokens 10000000 --d-sae 16384 --k 32 --out runs/a",
        "--model smollm2 --text stdlib --layer 12 --tokens 1000000 --out runs/b --dry-run",
        "acts.npy --steps 6000 --methods batchtopk topk sampled:score=l2/entropy,l=5/30 --seeds 0 1 --out runs/c",
    )
    OLD_FLAGS: ClassVar[Mapping[str, str]] = {
        **Collect.OLD_FLAGS,
        "--dead-after": "--auxk.dead-after",
        **{"--normalize": "--input-norm one", "--no-normalize": "--input-norm none"},
    }
    REMOVED: ClassVar[Mapping[str, str]] = {
        "--scores": "--methods sampled:score=l2/entropy",
        "--l": "--methods sampled:l=5/30",
        "--pick": "--methods sampled:pick=sample",
        "--fraction": "--methods released:fraction=0.5",
        "--at": "--methods released:at=0.7 (until= for the other methods)",
    }

    @staticmethod
    def notes() -> list[str]:
        """Lines of the help about methods and scores."""
        from sampled_sae.method.scores import SCORES

        own = {name: [key for key in parameters(name) if key not in COMMON] for name in METHODS}
        named = {name: ":".join(filter(None, (name, ",".join(f"{key}=" for key in own[name])))) for name in METHODS}
        described = {named[name]: (method.__doc__ or "").splitlines()[0] for name, method in METHODS.items()}
        return [heading("Methods"), *rows(described), "", heading("Scores"), *rows({"": ", ".join(SCORES)})]

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Train:
        """The values of flags that are not given: the preset's, where one is chosen."""
        words = [part for word in arguments for part in word.split("=", 1)]
        chosen = next((name for flag, name in pairwise(words) if flag == "--preset"), None)
        base = PRESETS.get(chosen, Train(tyro.MISSING))
        # One of the two, given in whichever way, replaces the preset's.
        return replace(base, steps=None, tokens=None) if {"--steps", "--tokens"} & set(words) else base

    def run(self) -> None:
        from sampled_sae.api import train
        from sampled_sae.data.source import open_source
        from sampled_sae.method.scores import load_scores
        from sampled_sae.training.trainer import check_start, steps_of
        from sampled_sae.utils.ranks import join, leave

        for script in self.load_scores:
            load_scores(script)
        self.refuse_unused()
        configs, steps = self.sae_configs(), steps_of(self.steps, self.tokens, self.batch_size)
        settings: dict[str, Any] = {name: getattr(self, name) for name in SHARED} | {"seed": self.seeds[0]}
        # Before the language model is loaded.
        check_start(configs, TrainConfig(steps, **settings), self.out, self.resume)
        path = self.activations
        if self.dry_run:
            print("\n".join(self.estimates(configs, TrainConfig(steps, **settings))))
            return
        if self.divide != "none":
            join(self.device)  # under torchrun, before the language model is put on this process's GPU
        source = self.collect.activations(self.device) if path is None else open_source(path, key=self.key)
        place: dict[str, Any] = {"out": self.out, "resume": self.resume, "device": self.device, "keep": False}
        print_saes(train(source, configs, steps=steps, divide=self.divide, **place, **settings))
        leave()

    def estimates(self, configs: list[SAEConfig], shared: TrainConfig) -> list[str]:
        """Lines about the cost of this training."""
        from sampled_sae.data.source import load_activations
        from sampled_sae.data.stream import held_out
        from sampled_sae.models.load import model_shape
        from sampled_sae.training.estimate import Reading, estimate
        from sampled_sae.utils.system import usable_device

        device, collect = usable_device(self.device), self.collect
        if self.activations is not None:
            tokens, d_in = load_activations(self.activations, self.key).shape
            held_out(tokens, shared.heldout_tokens, shared.batch_size)
            return estimate(configs, shared, d_in, device, self.out, tokens_there=tokens)
        text = collect.checked()
        text.documents()
        shape = model_shape(str(collect.model), collect.layer)
        half = collect.model_dtype in ("bfloat16", "float16") or (collect.model_dtype is None and device.type == "cuda")
        # Hook points by name may be anywhere, and of another width; taken as the residual stream after the last block.
        layers = collect.layer if not collect.hook else (shape.blocks - 1,)
        reading = Reading(shape, layers, collect.source.context, 2 if half else 4)
        streams = len(collect.layer) + len(collect.hook)
        return estimate(configs, shared, shape.width, device, self.out, streams=streams, reading=reading)

    def sae_configs(self) -> list[SAEConfig]:
        """The configurations of all SAEs."""
        if self.configs is not None:
            plain = read_file(self.configs, "configs").get("saes")
            if not isinstance(plain, list):
                raise UserError(f"{self.configs}: must hold a list of SAE configurations")
            return [SAEConfig.from_dict(item, f"{self.configs}: saes[{i}]") for i, item in enumerate(plain)]
        shared: dict[str, Any] = {"optimizer": OptimizerConfig.from_dict(self.optimizer.to_dict())}
        shared |= {"init": self.init, "auxk": self.auxk, "threshold": self.threshold}
        return parse_methods(self.methods, d_sae=self.d_sae, k=self.k, seeds=self.seeds, **shared)

    def refuse_unused(self) -> None:
        """Refuse flags that have no effect."""
        base = PRESETS.get(self.preset, Train(self.out))
        given = dict(_changed(self, base))
        collected = dict(_changed(self.collect, base.collect))
        if self.configs is not None:
            unused = [flag for flag in given if flag.split(".")[0] in IN_CONFIGS]
            _refuse(given, unused, f"with --configs {self.configs}: set it in that file")
            several = ["seeds"] if len(self.seeds) > 1 else []
            _refuse(given, several, f"with --configs {self.configs}: give one, and set the SAEs' own in that file")
        path = self.activations
        if path is None:
            if self.collect.model is None:
                others = "give a file of activations, or model, text and layer"
                raise UserError(f"model: is missing; {others} (sampled-sae resume needs only the folder of a run)")
            _refuse(given, ["key"], "with --model: it is for a file of activations")
            return
        if "model" in collected:
            raise UserError(f"activations = {str(path)!r} and model = {self.collect.model!r}: give one of the two")
        _refuse(collected, list(collected), f"with the activations in {path}: it is for --model")
        if path.suffix == ".npy" or path.is_dir():
            _refuse(given, ["key"], f"with {path}: it is for a file that holds several tensors")


@dataclass(frozen=True)
class Resume:
    """Continue an interrupted run, or extend a finished one. Model, text and settings are read from its folder."""

    folder: tyro.conf.Positional[Path]
    """Folder of the training: its --out."""
    extend: int | None = None
    """Steps to add to a finished run. Adam and the learning rate schedule start again over these steps: warm-up, the
    same peak, decay to 0. Pools stay as in the last step."""
    device: str | None = None
    """Device, such as cpu or cuda:1. Default: the kind of device that training started on."""
    divide: str = "auto"
    """Under torchrun, how its processes share the work, as for `sampled-sae train`."""
    load_scores: tuple[Path, ...] = ()
    """Python files that register custom scores."""

    EXAMPLES: ClassVar[Sequence[str]] = (
        "runs/a",
        "runs/a --extend 2000",
        "runs/a --device cuda:1 --load-scores my_score.py",
    )

    def run(self) -> None:
        from sampled_sae.api import resume
        from sampled_sae.method.scores import load_scores
        from sampled_sae.utils.ranks import leave

        for script in self.load_scores:
            load_scores(script)
        print_saes(resume(self.folder, extend=self.extend, device=self.device, keep=False, divide=self.divide))
        leave()


def _changed(settings: Any, base: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Flags and values that differ from `base`, those of groups with their prefix."""
    for item in fields(settings):
        value, usual = getattr(settings, item.name), getattr(base, item.name)
        if isinstance(value, Collect):
            continue
        if is_dataclass(value):
            yield from _changed(value, usual, f"{group}{item.name}.")
        elif value != usual:
            yield f"{group}{item.name}", value


def _refuse(given: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """One line about the first of these flags that was given."""
    for name in names:
        if name in given:
            raise UserError(f"{' '.join(words({name: given[name]}))} is not used {why}")


def print_saes(found: Mapping[str, Sequence[SAE]] | Sequence[SAE]) -> None:
    """Print the result of a training: only folders on stdout, for scripts."""
    saes = [sae for saes in found.values() for sae in saes] if isinstance(found, Mapping) else found
    for sae in saes:
        print(_summary(sae), file=sys.stderr)
        print(sae.folder, flush=True)
    if any(sae.cfg.metadata["training"].get("heldout") for sae in saes):
        about = "Held-out FVU and L0: on held-out tokens of the training data, which also calibrated the threshold"
        print(f"{about}; sampled-sae eval measures them on the text that you give", file=sys.stderr)


def _summary(sae: SAE) -> str:
    """FVU and L0 on held-out tokens, and the fraction of dead latents."""
    training, name = sae.cfg.metadata["training"], sae.cfg.training.name if sae.cfg.training else ""
    measured = training.get("heldout") or {}
    titles = {"fvu": "held-out FVU", "l0": "L0"}
    shown = [f"{title} {measured[key]:.3g}" for key, title in titles.items() if measured.get(key)]
    config = sae.cfg.training
    # No latent counts as dead before that many tokens.
    long = config is None or training["steps"] * training["batch_size"] > config.auxk.dead_after
    shown += [f"{training['dead']:.1%} dead"] if long and shown else []
    return f"{name}: {', '.join(shown)}" if shown else str(name)


SCORES, MULTIPLIERS = "l2/squared_l2/entropy/uniform", "1/3/4/5/10/20/30/40/50/60/70/100"
PAPER = Train(
    tyro.MISSING,
    preset="paper",
    tokens=25_000_000,
    d_sae=65_536,
    k=60,
    methods=("batchtopk", f"sampled:score={SCORES},l={MULTIPLIERS}"),
    input_norm="one",
    optimizer=Optimizer.from_dict(PAPER_OPTIMIZER.to_dict()),
    init=PAPER_INIT,
    collect=Collect(
        model="EleutherAI/pythia-160m-deduped",
        layer=(6,),
        text="monology/pile-uncopyrighted",
        source=Source(context=1024, high_norm_factor=None),
    ),
)
PRESETS: dict[str | None, Train] = {
    "paper": PAPER,
    "paper-50k": replace(PAPER, preset="paper-50k", tokens=None, steps=50_000),
}
