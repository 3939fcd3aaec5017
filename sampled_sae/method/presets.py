"""TopK, BatchTopK and Sampled-SAE by name: points of one family of pools.

`lr` is short for `optimizer=OptimizerConfig(lr=...)`; the other settings are those of `SAEConfig`. The presets are
also the methods of the command line: `parse_methods` turns `sampled:score=l2/entropy,l=5/30` into configurations. A
new preset is a function here, decorated with `preset`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from sampled_sae.config import require
from sampled_sae.method.config import (
    Annealed,
    Fraction,
    InitConfig,
    JumpReLUConfig,
    Multiplier,
    OptimizerConfig,
    PoolConfig,
    Rates,
    Released,
    SAEConfig,
    Scope,
)
from sampled_sae.utils.errors import UserError
from sampled_sae.utils.measures import unique

Preset = TypeVar("Preset", bound=Callable[..., SAEConfig])
PRESETS: dict[str, Callable[..., SAEConfig]] = {}


def preset(function: Preset) -> Preset:
    """Make a function (d_sae, k, ...) -> SAEConfig available under its name, in Python and for `--methods`."""
    PRESETS[function.__name__] = function
    return function


@preset
def batchtopk(d_sae: int, k: int, *, lr: float | None = None, **settings: Any) -> SAEConfig:
    """Keep the k * B largest activations of each batch of B tokens."""
    return _made(d_sae, k, PoolConfig(), lr, settings)


@preset
def topk(d_sae: int, k: int, *, lr: float | None = None, **settings: Any) -> SAEConfig:
    """Keep the k largest activations of each token."""
    return _made(d_sae, k, PoolConfig(scope=Scope(tokens=1)), lr, settings)


@preset
def topk_then_batchtopk(
    d_sae: int, k: int, until: float = 0.05, *, lr: float | None = None, **settings: Any
) -> SAEConfig:
    """TopK for the first fraction of the steps (until), then BatchTopK."""
    return _made(d_sae, k, PoolConfig(scope=Scope(tokens=1, until=until)), lr, settings)


MATRYOSHKA = (1 / 32, 3 / 32, 7 / 32, 15 / 32, 1)
"""Nested prefixes as shares of d_sae: the groups of dictionary_learning's demo, 1/32, 1/16, 1/8, 1/4 and the rest."""


@preset
def matryoshka(
    d_sae: int, k: int, prefixes: Sequence[float] = MATRYOSHKA, *, lr: float | None = None, **settings: Any
) -> SAEConfig:
    """BatchTopK with nested prefixes of latents, each of which reconstructs the input on its own."""
    return batchtopk(d_sae, k, lr=lr, prefixes=prefixes, **settings)


@preset
def jumprelu(
    d_sae: int,
    k: int,
    bandwidth: float = JumpReLUConfig().bandwidth,
    penalty: float = JumpReLUConfig().penalty,
    *,
    lr: float | None = None,
    **settings: Any,
) -> SAEConfig:
    """A learned threshold for each latent, trained to a mean L0 of k."""
    return _made(d_sae, k, PoolConfig(), lr, {"jumprelu": JumpReLUConfig(bandwidth, penalty), **settings})


@preset
def sampled(
    d_sae: int,
    k: int,
    score: str = "l2",
    l: float = 5,
    pick: Literal["top", "sample"] = "top",
    memory: float | None = None,
    inference_size: float | None = None,
    *,
    lr: float | None = None,
    **settings: Any,
) -> SAEConfig:
    """The paper's Sampled-SAE: BatchTopK within the floor(k * l) latents with the highest score."""
    pool = PoolConfig(score=score, size=Multiplier(l), pick=pick, memory=memory, inference_size=inference_size)
    return _made(d_sae, k, pool, lr, settings)


@preset
def released(
    d_sae: int,
    k: int,
    score: str = "uniform",
    fraction: float = 0.5,
    at: float = 0.7,
    *,
    lr: float | None = None,
    **settings: Any,
) -> SAEConfig:
    """A pool with a fraction of the latents, which opens to all latents after a fraction of the steps (at)."""
    pool = PoolConfig(score=score, size=Fraction(fraction), schedule=Released(at))
    return _made(d_sae, k, pool, lr, settings)


@preset
def annealed(
    d_sae: int,
    k: int,
    score: str = "uniform",
    fraction: float = 0.3,
    until: float = 1.0,
    *,
    lr: float | None = None,
    **settings: Any,
) -> SAEConfig:
    """A pool that grows from a fraction of the latents to all of them."""
    pool = PoolConfig(score=score, size=Fraction(fraction), schedule=Annealed(until))
    return _made(d_sae, k, pool, lr, settings)


DEFAULT_METHODS = ("topk_then_batchtopk",)
"""Method specs that are trained unless others are named."""

PAPER_OPTIMIZER = OptimizerConfig(
    lr=3e-4,
    gradient="clip",
    clip=1.0,
    cautious=False,
    beta2=0.999,
    rates=Rates(W_enc=1, b_enc=1, W_dec=1, b_dec=1),
    warmup_steps=1000,
    decay=0.2,
)
PAPER_INIT = InitConfig(decoder="random", encoder_scale=1)


def paper_recipe(lr: float = 3e-4) -> dict[str, Any]:
    """Settings of `SAEConfig` for the paper's training, which is that of dictionary_learning: `topk(48, 4, **this)`.

    It belongs to inputs of norm 1: `train(..., input_norm="one")`.
    """
    return {"optimizer": replace(PAPER_OPTIMIZER, lr=lr), "init": PAPER_INIT}


def _made(d_sae: int, k: int, pool: PoolConfig, lr: float | None, settings: dict[str, Any]) -> SAEConfig:
    if settings.get("prefixes") is not None:
        settings = settings | {"prefixes": _given_widths(settings["prefixes"], d_sae)}
    if lr is None:
        return SAEConfig(d_sae, k, pool=pool, **settings)
    if "optimizer" in settings:
        raise UserError(f"lr = {lr} and optimizer = {settings['optimizer']}: set only one of the two")
    return SAEConfig(d_sae, k, pool=pool, optimizer=OptimizerConfig(lr=lr), **settings)


def _given_widths(prefixes: Any, d_sae: int) -> Any:
    """`prefix_widths` as users give them; what is no list of numbers is left for `SAEConfig` to report."""
    try:
        given = tuple(prefixes)
        shares, widths = [part for part in given if 0 < part <= 1], prefix_widths(given, d_sae)
    except TypeError:
        return prefixes
    if d_sae >= 1 and shares and min(shares) * d_sae < 1 - 1e-9:
        right = f"must be at least {math.ceil(1 / min(shares) - 1e-9)}, so that the prefix {min(shares):g} has a latent"
        require(False, "d_sae", d_sae, right)
    return widths


def prefix_widths(prefixes: Sequence[float], d_sae: int) -> tuple[float, ...]:
    """Nested prefixes as widths; those of at most 1 are shares of d_sae. The last one, d_sae, may be left out."""
    # The tiny addend keeps shares such as 3/10 from losing a latent to rounding.
    widths = tuple(math.floor(part * d_sae + 1e-9) if 0 < part <= 1 else part for part in prefixes)
    return widths if widths[-1:] == (d_sae,) else (*widths, d_sae)


# ---- methods of the command line --------------------------------------------------------------------


def parse_methods(
    specs: Sequence[str], *, d_sae: int, k: int, seeds: Sequence[int | None] = (None,), **shared: Any
) -> list[SAEConfig]:
    """Method specs -> configurations, each once per seed.

    A spec is a preset's name and, after a colon, values of its parameters with commas between them; `/` separates
    alternatives, and all combinations of these are made: `batchtopk`, `sampled:score=l2/entropy,l=5/30`. Every preset
    takes `prefixes`, with + between them: `matryoshka:prefixes=0.1+0.4`, `topk:prefixes=2048+8192`. `d_sae`, `k` and
    `shared` (settings of `SAEConfig`, or `lr`) hold unless the spec sets them. SAEs that differ in `d_sae`, `k` or `lr`
    get these into their names.
    """
    if not specs or not seeds:
        raise UserError("methods and seeds: each must name at least one")
    return [config for spec in specs for config in _of_spec(spec, seeds, {"d_sae": d_sae, "k": k, **shared})]


def _of_spec(spec: str, seeds: Sequence[int | None], shared: dict[str, Any]) -> Iterator[SAEConfig]:
    method, _, settings = spec.partition(":")
    if method not in PRESETS:
        raise UserError(f"methods = {spec!r}: unknown method {method!r}; the methods are {', '.join(PRESETS)}")
    choices = _choices(spec, settings, parameters(method))
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        given = {**shared, **chosen}
        if "lr" in chosen and "optimizer" in given:
            given["optimizer"] = replace(given["optimizer"], lr=given.pop("lr"))
        words = [f"{key}{chosen[key]:g}" for key in ("d_sae", "k", "lr") if len(choices.get(key, ())) > 1]
        for seed in seeds:
            try:
                config = PRESETS[method](**given, seed=seed)
                named = "-".join([label(config), *words, *([] if seed is None else [f"s{seed}"])]) if words else None
                yield replace(config, name=named)
            except UserError as error:
                raise UserError(f"methods = {spec!r}: {error}") from None


def _choices(spec: str, settings: str, known: dict[str, inspect.Parameter]) -> dict[str, list[Any]]:
    """The alternatives of each parameter in a spec."""
    choices: dict[str, list[Any]] = {}
    for item in filter(None, settings.split(",")):
        key, equals, values = item.partition("=")
        if key not in known or not equals or key in choices:
            right = f"must be parameter=value, each parameter once; the parameters are {', '.join(known)}"
            raise UserError(f"methods = {spec!r}: {item!r}: {right}")
        choices[key] = [_value(spec, key, text, known[key].annotation) for text in values.split("/")]
    return choices


def _value(spec: str, key: str, text: str, hint: Any) -> Any:
    kinds = {hint, *get_args(hint)}
    try:
        if key == "prefixes":
            return tuple(int(part) if part.isdigit() else float(part) for part in text.split("+"))
        return int(text) if int in kinds else float(text) if float in kinds else text
    except ValueError:
        right = "must be a whole number" if int in kinds else "must be a number"
        raise UserError(f"methods = {spec!r}: {key} = {text!r}: {right}") from None


def parameters(method: str) -> dict[str, inspect.Parameter]:
    """The parameters of a preset that a spec can set, with their types and defaults."""
    hints = get_type_hints(PRESETS[method])
    own = inspect.signature(PRESETS[method]).parameters.values()
    known = {item.name: item.replace(annotation=hints[item.name]) for item in own if item.kind != item.VAR_KEYWORD}
    return known | {"prefixes": inspect.Parameter("prefixes", inspect.Parameter.KEYWORD_ONLY)}


# ---- names ------------------------------------------------------------------------------------------


def label(config: SAEConfig) -> str:
    """A short name for the settings that people compare, such as `l2-l5` or `uniform-50pct-released70`."""
    pool, tokens = config.pool, config.pool.scope.tokens
    groups = f"groups{tokens}"
    if pool.restricts:
        words = [pool.score, pool.size.label, pool.schedule.label, "" if tokens is None else groups]
    else:
        words = [{None: "batchtopk", 1: "topk"}.get(tokens, groups), pool.schedule.label]
    if config.jumprelu is not None:
        words = ["jumprelu"]
    if pool.scope.until < 1:
        words.append(f"then-{pool.scope.then or 'batch'}-at{100 * pool.scope.until:g}")
    if pool.memory is not None:
        words.append(f"memory{pool.memory:g}")
    if pool.pick == "sample":
        words.append("sampled")
    if pool.inference_size is not None:
        words.append(f"open{pool.inference_size:g}")
    if pool.refresh > 1:
        words.append(f"every{pool.refresh}")
    if config.cut == "token":
        words.append("rowwise")
    words = list(filter(None, words))
    if config.prefixes is not None:
        usual = config.prefixes == prefix_widths(MATRYOSHKA, config.d_sae)
        widths = [] if usual else map(str, config.prefixes[:-1])
        words = ["matryoshka", *widths, *(words if words != ["batchtopk"] else [])]
    return "-".join(words)


def spec(config: SAEConfig) -> str:
    """The method as `parse_methods` takes it, such as `topk` or `sampled:score=l2,l=5`; `label` if no spec gives it.

    Parameters at their defaults are left out, but a Sampled-SAE always has its score and l.
    """
    pool = config.pool
    fields = [pool, pool.size, pool.schedule, *([config.jumprelu] if config.jumprelu else []), config]
    values = {name: getattr(part, name) for part in reversed(fields) for name in part.__dataclass_fields__}
    if pool.scope.until < 1:
        values["until"] = pool.scope.until
    for method in sorted(PRESETS, key=lambda name: name != "matryoshka"):  # any method may have prefixes
        known = parameters(method)
        given = {name: values[name] for name in known if name in values and name not in ("d_sae", "k", "lr")}
        lacking = any(
            item.default is item.empty and name not in (*given, "d_sae", "k", "prefixes")
            for name, item in known.items()
        )
        if lacking or (method == "matryoshka" and config.prefixes is None):
            continue
        try:
            made = PRESETS[method](config.d_sae, config.k, **given)
        except UserError:  # a value means something else there: a prefix of 1 is a share
            continue
        if all(getattr(made, name) == getattr(config, name) for name in ("pool", "prefixes", "jumprelu", "cut")):
            words = [
                f"{name}={_spec_value(value)}"
                for name, value in given.items()
                if not _is_default(method, config, name, value)
            ]
            return f"{method}:{','.join(words)}" if words else method
    return label(config)


def _is_default(method: str, config: SAEConfig, name: str, value: Any) -> bool:
    """Whether a spec need not name this parameter."""
    if name == "prefixes":
        return value is None or (method == "matryoshka" and value == prefix_widths(MATRYOSHKA, config.d_sae))
    return value == parameters(method)[name].default and not (method == "sampled" and name in ("score", "l"))


def _spec_value(value: Any) -> str:
    return (
        "+".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else value
    )


def named(configs: list[SAEConfig], seed: int) -> list[SAEConfig]:
    """The same configurations, each with its seed filled in and a name that no other one has."""
    full = []
    taken: set[str] = set()
    for config in configs:
        own_seed = seed if config.seed is None else config.seed
        name = unique(config.name or f"{label(config)}-s{own_seed}", taken)
        full.append(replace(config, seed=own_seed, name=name))
    return full
