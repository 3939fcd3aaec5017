"""TopK, BatchTopK and Sampled-SAE by name: points of one family of pools.

`lr` is short for `optimizer=OptimizerConfig(lr=...)`; the other settings are those of `SAEConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from sampled_sae.method.config import (
    Annealed,
    Everything,
    Fraction,
    Multiplier,
    OptimizerConfig,
    PoolConfig,
    Released,
    SAEConfig,
    Scope,
)
from sampled_sae.utils.errors import UserError


def batchtopk(d_sae: int, k: int, *, lr: float | None = None, **settings: Any) -> SAEConfig:
    """Every latent competes over the whole batch."""
    return _made(d_sae, k, PoolConfig(), lr, settings)


def topk(d_sae: int, k: int, *, lr: float | None = None, **settings: Any) -> SAEConfig:
    """Each token keeps its own k largest: a scope of one token."""
    return _made(d_sae, k, PoolConfig(scope=Scope(tokens=1)), lr, settings)


def topk_then_batchtopk(
    d_sae: int, k: int, until: float = 0.7, *, lr: float | None = None, **settings: Any
) -> SAEConfig:
    """TopK for the first share of the steps, BatchTopK after."""
    return _made(d_sae, k, PoolConfig(scope=Scope(tokens=1, until=until)), lr, settings)


def sampled(
    d_sae: int,
    k: int,
    score: str = "l2",
    l: float = 5,
    pick: Literal["top", "sample"] = "top",
    *,
    lr: float | None = None,
    **settings: Any,
) -> SAEConfig:
    """The paper's Sampled-SAE: BatchTopK inside the floor(k * l) latents of the highest score."""
    return _made(d_sae, k, PoolConfig(score=score, size=Multiplier(l), pick=pick), lr, settings)


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
    """A pool of a share of the latents that opens to all of them after a share of the steps."""
    pool = PoolConfig(score=score, size=Fraction(fraction), schedule=Released(at))
    return _made(d_sae, k, pool, lr, settings)


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
    """A pool that grows from a share of the latents to all of them."""
    pool = PoolConfig(score=score, size=Fraction(fraction), schedule=Annealed(until))
    return _made(d_sae, k, pool, lr, settings)


def _made(d_sae: int, k: int, pool: PoolConfig, lr: float | None, settings: dict[str, Any]) -> SAEConfig:
    if lr is None:
        return SAEConfig(d_sae, k, pool=pool, **settings)
    if "optimizer" in settings:
        raise UserError(f"lr = {lr} and optimizer = {settings['optimizer']}: give one of the two")
    return SAEConfig(d_sae, k, pool=pool, optimizer=OptimizerConfig(lr=lr), **settings)


PRESETS: dict[str, Callable[..., SAEConfig]] = {
    "batchtopk": batchtopk,
    "topk": topk,
    "topk_then_batchtopk": topk_then_batchtopk,
    "sampled": sampled,
    "released": released,
    "annealed": annealed,
}


def label(config: SAEConfig) -> str:
    """A short name for the settings that people compare, such as `l2-l5` or `uniform-50pct-released70`."""
    pool = config.pool
    words = []
    match pool.size:
        case Everything():
            words.append({None: "batchtopk", 1: "topk"}.get(pool.scope.tokens, f"groups{pool.scope.tokens}"))
        case Multiplier(l):
            words += [pool.score, f"l{l:g}"]
        case Fraction(fraction):
            words += [pool.score, f"{100 * fraction:g}pct"]
        case size:
            words += [pool.score, f"size{size.size}"]
    match pool.schedule:
        case Released(at):
            words.append(f"released{100 * at:g}")
        case Annealed(until):
            words.append(f"annealed{100 * until:g}")
    if pool.scope.tokens is not None and not isinstance(pool.size, Everything):
        words.append(f"groups{pool.scope.tokens}")
    if pool.scope.until < 1:
        words.append(f"then-{pool.scope.then or 'batch'}-at{100 * pool.scope.until:g}")
    if pool.pick == "sample":
        words.append("sampled")
    if pool.refresh > 1:
        words.append(f"every{pool.refresh}")
    if config.cut == "token":
        words.append("rowwise")
    return "-".join(words)


def named(configs: list[SAEConfig], seed: int) -> list[SAEConfig]:
    """The same configurations, each with its seed filled in and a name that no other one has."""
    full = []
    taken: set[str] = set()
    for config in configs:
        own_seed = seed if config.seed is None else config.seed
        base = config.name or f"{label(config)}-s{own_seed}"
        name, count = base, 2
        while name in taken:
            name, count = f"{base}-{count}", count + 1
        taken.add(name)
        full.append(replace(config, seed=own_seed, name=name))
    return full
