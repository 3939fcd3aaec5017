"""A sweep as one declarative file: models, hook points, text, methods, sizes, seeds, length and evaluations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from sampled_sae.config import Config, Count, Distinct, NotEmpty, Positive, Seed, require
from sampled_sae.data.buffer import HarvestConfig
from sampled_sae.data.cache_index import SHARD_TOKENS
from sampled_sae.data.text import TextSource
from sampled_sae.evals import get_evaluation
from sampled_sae.evals.session import Request
from sampled_sae.method.config import AuxKConfig, InitConfig, OptimizerConfig, SAEConfig, ThresholdConfig
from sampled_sae.method.presets import DEFAULT_METHODS, parse_methods
from sampled_sae.method.scores import get_score, load_scores
from sampled_sae.training.settings import InputNorm, TrainConfig
from sampled_sae.training.trainer import checked, steps_of
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.files import read_json
from sampled_sae.utils.third_party import package, reason

ModelDtype = Literal["float32", "bfloat16", "float16"]
YAML = (".yaml", ".yml")
EXTENSIONS = (*YAML, ".json")
FREE = ("slurm", "log_every", "checkpoint_every", "log_to")
"""Fields that may change while a sweep is in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(HarvestConfig):
    """How activations are collected from a model."""

    hooks: tuple[int | str, ...] = ()
    """Set by the sweep's layers and hooks."""


@dataclass(frozen=True, slots=True)
class Model(Config):
    """A language model whose layers, hook points or precision differ from those of the sweep."""

    name: str
    """Hub name or folder of a causal language model, a .gguf file, or smollm2."""
    layers: tuple[Count, ...] | None = None
    """Blocks of this model; unset takes the sweep's."""
    hooks: tuple[str, ...] | None = None
    """Hook points of this model by name; unset takes the sweep's."""
    dtype: ModelDtype | None = None
    """Precision; bfloat16 on a GPU, float32 elsewhere when unset."""


@dataclass(frozen=True, slots=True)
class SharedCache(Config):
    """Activations that are written to disk once, by jobs of their own, and read by all jobs at a hook point."""

    parts: Positive = 1
    """Jobs that write a cache together."""
    tokens: Positive | None = None
    """Tokens that are kept; if unset, as many as the training reads. A longer training reads them again."""
    shard_tokens: Positive = SHARD_TOKENS
    """Tokens per file."""


@dataclass(frozen=True, slots=True)
class SlurmConfig(Config):
    """How jobs are submitted to Slurm."""

    partition: str | None = None
    """Partition, or several with commas between them. Default: the cluster's."""
    minutes: Positive = 240
    """Time limit of a job. A job that needs longer writes a checkpoint, is requeued and continues."""
    gpus_per_job: Count = 1
    """GPUs of a job, of one node; several train it together, under torchrun. 0 for CPU jobs."""
    cpus_per_job: Positive = 4
    """CPU cores of a job."""
    memory_gb: Positive | None = None
    """Main memory of a job in GB. Default: the cluster's."""
    jobs_at_once: Positive = 256
    """Maximum number of jobs of the sweep that run at the same time."""
    seconds_to_stop: Positive = 90
    """Seconds before the time limit at which a job is asked to write its checkpoint."""
    max_requeues: Count = 100
    """Maximum number of times that a job is requeued."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have."""
    setup: tuple[str, ...] = ()
    """Shell lines that run before each job, such as module load cuda."""
    extra: dict[str, str] = field(default_factory=dict)
    """Further options of sbatch, by their long names."""


@dataclass(frozen=True, slots=True)
class SweepConfig(Config):
    """What a sweep trains and evaluates: every method with every d_sae, k and seed, at every hook point."""

    models: tuple[str | Model, ...] = ()
    """Language models by name, or with layers and hook points of their own."""
    layers: tuple[Count, ...] = ()
    """The residual stream after these blocks of each model, counted from 0."""
    hooks: tuple[str, ...] = ()
    """Hook points by name, instead of or in addition to layers."""
    text: str | TextSource | None = None
    """Text whose activations are trained on: a hub dataset, a file, a folder of files, or stdlib."""
    activations: tuple[str, ...] = ()
    """Files or caches of activations, instead of models."""
    key: str | None = None
    """Name of the tensor in files of activations that hold several."""
    methods: Annotated[tuple[str, ...], NotEmpty, Distinct] = DEFAULT_METHODS
    """Methods as `sampled-sae train --methods` takes them, such as sampled:score=l2/entropy,l=5/30."""
    d_sae: Annotated[tuple[Positive, ...], NotEmpty, Distinct] = (16_384,)
    """Latents; methods that set d_sae themselves keep it."""
    k: Annotated[tuple[Positive, ...], NotEmpty, Distinct] = (32,)
    """Mean active latents per token; methods that set k themselves keep it."""
    seeds: Annotated[tuple[Seed, ...], NotEmpty, Distinct] = (0,)
    """Each SAE is trained once with each seed; all seeds see the same batches."""
    tokens: Positive | None = None
    """Tokens to train on; alternatively steps."""
    steps: Positive | None = None
    """Optimizer steps."""
    batch_size: Positive = 4096
    """Tokens per step."""
    data_seed: Seed = 0
    """Seed of the order of the activations."""
    input_norm: InputNorm = "sqrt_d_in"
    """Root mean square norm that the inputs are scaled to in training."""
    heldout_tokens: Positive = 65_536
    """Tokens kept out of training to measure the input's scale and to calibrate the threshold."""
    log_every: Positive = 50
    """Steps between log lines."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints. Default: 1,000, and at least a minute apart."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Further destinations of the log."""
    source: Source = field(default_factory=Source)
    """How activations are collected: context, buffer_tokens and the other settings of a harvest."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    init: InitConfig = field(default_factory=InitConfig)
    auxk: AuxKConfig = field(default_factory=AuxKConfig)
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)
    scores: tuple[str, ...] = ()
    """Python files that register custom scores."""
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of each evaluation by its name; a list of names stands for their defaults."""
    eval_text: str | TextSource | None = None
    """Text for the evaluations that read one; the text of training, held-out contexts of it, when unset."""
    saes_per_job: Positive | None = None
    """SAEs of one job at most; unset puts all that share a stream of activations into one job."""
    hooks_per_job: Positive = 1
    """Hook points of a model that are trained in one job, from the same forward passes."""
    cache: SharedCache | None = None
    """Write the activations of each hook point to disk first; an empty object takes the defaults."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def check(self) -> None:
        if bool(self.models) == bool(self.activations):
            raise UserError("models and activations: give one of the two")
        require(not self.source.hooks, "source.hooks", self.source.hooks, "set layers or hooks of the sweep instead")
        require(not self.models or self.text is not None, "text", self.text, "models need a text")
        if self.cache is not None:
            require(bool(self.models), "activations", self.activations, "a cache is written of models")
            right = "must be 1 with a cache, which holds one hook point"
            require(self.hooks_per_job == 1, "hooks_per_job", self.hooks_per_job, right)
        names = [model.name for model in self.listed_models()]
        require(len(set(names)) == len(names), "models", names, "must name each model once")
        for model in self.listed_models():
            if not (model.layers or model.hooks):
                raise UserError(f"layers: are missing for {model.name}; give layers, or hooks")
        for script in self.scores:
            _load_scores(Path(script).absolute())
        for sae in checked(self.saes(), self.train()):
            if sae.pool.restricts:
                get_score(sae.pool.score)
        self.requests()

    def listed_models(self) -> list[Model]:
        """The models, each with its layers and hook points."""
        models = [Model(each) if isinstance(each, str) else each for each in self.models]
        return [
            Model(
                each.name,
                self.layers if each.layers is None else each.layers,
                self.hooks if each.hooks is None else each.hooks,
                each.dtype,
            )
            for each in models
        ]

    def saes(self) -> list[SAEConfig]:
        """The configurations of all SAEs at one hook point."""
        shared = {name: getattr(self, name) for name in ("optimizer", "init", "auxk", "threshold")}
        specs = [_with_sizes(spec, d_sae=self.d_sae, k=self.k) for spec in self.methods]
        return parse_methods(specs, d_sae=self.d_sae[0], k=self.k[0], seeds=self.seeds, **shared)

    def train(self) -> TrainConfig:
        """The settings that all SAEs share."""
        names = ("batch_size", "input_norm", "heldout_tokens", "log_every", "checkpoint_every", "log_to")
        settings = {name: getattr(self, name) for name in names}
        return TrainConfig(steps_of(self.steps, self.tokens, self.batch_size), seed=self.data_seed, **settings)

    def cached_tokens(self) -> int:
        """Tokens of each cache."""
        assert self.cache is not None
        return self.cache.tokens or self.train().steps * self.batch_size + self.heldout_tokens

    def requests(self) -> list[Request]:
        """The evaluations with their settings."""
        scripts = {name: str(Path(name).absolute()) for name in self.evaluations if name.endswith(".py")}
        found = [(_evaluation(scripts.get(name, name)), name, plain) for name, plain in self.evaluations.items()]
        text = self.eval_text or self.text
        for evaluation, name, _ in found:
            if evaluation.needs.text and text is None:
                raise UserError(f"eval_text: is missing; {name} reads one")
        return [
            Request(evaluation, evaluation.config.from_dict(plain, f"evaluations.{name}"))
            for evaluation, name, plain in found
        ]

    def decisive(self) -> dict[str, Any]:
        """The settings that decide the results, as plain JSON."""
        return {name: value for name, value in self.to_dict().items() if name not in FREE}


# A spec is read several times, but a user's file is run once.
_load_scores, _evaluation = cache(load_scores), cache(get_evaluation)


def _with_sizes(spec: str, **sizes: tuple[int, ...]) -> str:
    """A method spec with the sweep's alternatives of each size that it does not set itself."""
    added = [
        f"{name}={'/'.join(map(str, values))}"
        for name, values in sizes.items()
        if len(values) > 1 and not re.search(rf"[:,]{name}=", spec)
    ]
    if not added:
        return spec
    return ",".join([spec if ":" in spec else f"{spec}:", *added]).replace(":,", ":")


# ---- files ------------------------------------------------------------------------------------------

LISTS = ("models", "layers", "hooks", "activations", "methods", "d_sae", "k", "seeds", "scores", "log_to")
"""Fields for which a single value stands for a list of one."""


def read_spec(path: Path) -> SweepConfig:
    """The sweep in a YAML or JSON file."""
    if path.suffix not in EXTENSIONS:
        raise UserError(f"spec = {str(path)!r}: must be a file that ends in {', '.join(EXTENSIONS)}")
    plain = _read_yaml(path) if path.suffix in YAML else read_json(path)
    if not isinstance(plain, dict):
        raise UserError(f"{path}: must hold named fields, such as models, layers, text and methods")
    return SweepConfig.from_dict(completed(plain), path)


def completed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as users write them -> as `SweepConfig` has them: lists, and the settings of evaluations by name."""
    full = {
        name: [value] if name in LISTS and value is not None and not isinstance(value, list) else value
        for name, value in plain.items()
    }
    evaluations = full.get("evaluations")
    if isinstance(evaluations, str):
        evaluations = [evaluations]
    if isinstance(evaluations, list):
        evaluations = {str(name): {} for name in evaluations}
    if isinstance(evaluations, dict):
        full["evaluations"] = {name: {} if value is None else value for name, value in evaluations.items()}
    return full


def _read_yaml(path: Path) -> Any:
    """A YAML file. Numbers such as 3e-4 are numbers, as in YAML 1.2, and a name that is given twice is an error."""
    yaml = package("yaml", f"spec = {str(path)!r}", "cluster")

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        pass

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        names = [loader.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
        if twice is not None:
            raise UserError(f"{path}: {twice}: is given twice")
        return dict(zip(names, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)  # a SafeLoader
    except FileNotFoundError:
        raise UserError(f"spec = {str(path)!r}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise UserError(f"{path}: not valid YAML ({reason(error)})") from None
