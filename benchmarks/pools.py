"""Why SAEs trained with small constant pools fail at the inference threshold (docs/results/pools.json).

    python benchmarks/pools.py --acts acts.npy --out pools.json      # 10 minutes on two idle cores
    python benchmarks/pools.py --out pools.json --table

SAEs on SmolLM2-135M, layer 12, on Python's standard library. Each is measured on held-out tokens with training-time
selection, at its threshold, and with several remedies, each calibrated to a mean L0 of K on other held-out tokens.
A run that is in the file already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sampled_sae as ss
from sampled_sae.method.config import AuxKConfig, SAEConfig
from sampled_sae.method.pools import Candidates, PlainEncoder, candidates, highest
from sampled_sae.method.rate import default_lr
from sampled_sae.method.selection import keep_largest
from sampled_sae.training.heldout import LAST, STEPS, parameters
from sampled_sae.training.learner import LAST_POOLS
from sampled_sae.training.run import Callback, Run

METHODS = (
    *("batchtopk", "l2", "l1", "entropy", "entropy-no-auxk", "frequency", "participation", "prefix", "uniform"),
    *("entropy-once", "entropy-x4", "prefix-no-auxk", "entropy-l46", "uniform-l46"),
)
"""l is 5 unless a name says otherwise; l = 46 is 9% of the latents, like l = 100 in the study. once: the
pool of the first step is kept. x4: four times the default learning rate."""
SETTING = {"d_sae": 4096, "k": 8, "l": 5, "steps": 400, "batch_size": 256, "dead_after": 0.4}
HELD, TRAINED = 4096, 22_528
"""Tokens of the text's beginning that are held out (less those with a high norm), and tokens after it to train on."""


def harvest(path: Path) -> None:
    """Write the held-out tokens and, after them, the training tokens [about HELD + TRAINED, 576]."""
    source = ss.activations("smollm2", text="stdlib", layer=12, context=256, buffer_tokens=8192, device="cpu")
    [stream] = source.open(512, HELD, 0, TRAINED // 512).values()
    batches = [stream.batch(step).float().clone() for step in range(TRAINED // 512)]
    np.save(path, torch.cat([stream.heldout.float(), *batches]).numpy())
    stream.close()


class Pools(Callback):
    """In how many steps each latent was in the pool: in all of them, and in the last tenth."""

    def __init__(self, d_sae: int, steps: int):
        self.ever, self.last, self.begin = torch.zeros(d_sae), torch.zeros(d_sae), int(LAST_POOLS * steps)
        self.counted, self.W_dec, self.now = 0, torch.empty(0), torch.empty(0)

    def on_step(self, run: Run, learner: Any, step: int, stats: Any) -> None:
        if step == 0:
            self.W_dec = learner.weights.W_dec.clone()
        self.now = learner.pool
        self.ever += learner.pool
        if step >= self.begin:
            self.last += learner.pool
            self.counted += 1


def configuration(method: str, setting: dict[str, Any], seed: int, d_in: int) -> SAEConfig:
    """One of METHODS. As in the study, latents count as dead after 40% of the tokens (10M of 25M)."""
    score, _, other = method.partition("-")
    dead_after = int(setting["dead_after"] * setting["steps"] * setting["batch_size"])
    auxk = AuxKConfig(alpha=0 if other == "no-auxk" else AuxKConfig().alpha, dead_after=dead_after)
    if method == "batchtopk":
        config = ss.batchtopk(setting["d_sae"], setting["k"], auxk=auxk)
    else:
        l = float(other[1:]) if other[:1] == "l" else setting["l"]
        config = ss.sampled(setting["d_sae"], setting["k"], score, l, auxk=auxk)
    if other == "x4":
        given = (setting["d_sae"], setting["k"], setting["batch_size"], setting["steps"])
        config = replace(config, optimizer=replace(config.optimizer, lr=4 * default_lr(d_in, *given)))
    if other == "once":
        config = replace(config, pool=replace(config.pool, refresh=setting["steps"]))
    return replace(config, name=method, seed=seed)


def run(x: Tensor, held: Tensor, method: str, setting: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train on x [n, d_in] and measure on every second token of `held`; the others calibrate."""
    config, size = configuration(method, setting, seed, x.shape[1]), setting["batch_size"]
    pools = Pools(config.d_sae, setting["steps"])
    calibration, test = held[::2], held[1::2]
    test = test[: len(test) - len(test) % size]
    sae = ss.train(
        x,
        config,
        steps=setting["steps"],
        batch_size=size,
        seed=seed,
        heldout=calibration,
        callbacks=[pools],
        progress=False,
        device="cpu",
    )
    with torch.no_grad():
        found = Measured(sae, config, pools, calibration, test, size)
        values = found.cause() | found.remedies()
    return {"method": method, "seed": seed, **values}


class Measured:
    """One SAE on calibration tokens [n, d_in] and test tokens [t, d_in]."""

    def __init__(self, sae: ss.SAE, config: SAEConfig, pools: Pools, calibration: Tensor, test: Tensor, size: int):
        self.sae, self.config, self.pools, self.test, self.size = sae, config, pools, test, size
        self.calibration = calibration[: len(calibration) - len(calibration) % size]
        self.pre, self.other = sae.pre_activations(test), sae.pre_activations(self.calibration)
        self.pool, self.other_pool = self.pools_of(test), self.pools_of(self.calibration)
        self.theta = float(sae.threshold)

    def pools_of(self, x: Tensor) -> Tensor:
        """[n, d_sae] bool: latents in the pool of each token's batch."""
        return torch.cat([found.pool.expand(len(found.z), -1) for found in self.candidates(x)])

    def candidates(self, x: Tensor) -> Iterator[Candidates]:
        """The pool and its activations in each batch of x [n, d_in], as in training."""
        generator, weights = torch.Generator().manual_seed(0), parameters(self.sae)
        for part in x.split(self.size):
            yield candidates(PlainEncoder(part, weights), self.config, LAST, STEPS, generator, self.pools.now)

    def trained(self, x: Tensor) -> Tensor:
        """Codes [n, d_sae] of training-time selection."""
        k, m = self.config.k, self.config.d_sae
        found = self.candidates(x)
        return torch.cat([keep_largest(one.z, k, one.group, m, one.columns, "batch").dense() for one in found])

    def fvu(self, codes: Tensor) -> float:
        left = (self.test - self.sae.decode(codes)).square().sum()
        return float(left / (self.test - self.test.mean(0)).square().sum())

    def at(self, theta: float | Tensor, allowed: Tensor | None = None) -> dict[str, float]:
        """FVU and L0 of the test tokens where z > theta and the latent is allowed [d_sae] or [t, d_sae]."""
        codes = self.codes(theta, allowed)
        return {"fvu": self.fvu(codes), "l0": float((codes > 0).sum() / len(codes))}

    def codes(self, theta: float | Tensor, allowed: Tensor | None = None) -> Tensor:
        passes = (self.pre > theta) & (self.pre > 0)
        return torch.where(passes if allowed is None else passes & allowed, self.pre, 0)

    def calibrated(self, allowed: Tensor) -> float:
        """The threshold that gives the allowed latents a mean L0 of K on the calibration tokens."""
        z = self.other[allowed.expand_as(self.other)].clamp_min(0)
        wanted = self.config.k * len(self.other)
        return float(z.topk(wanted + 1).values.min()) if len(z) > wanted else 0.0

    def closing(self, allowed: Tensor) -> dict[str, float]:
        """Only the allowed latents [d_sae] can fire, at a threshold calibrated for them."""
        return {"latents": int(allowed.sum()), **self.at(self.calibrated(allowed), allowed)}

    def cause(self) -> dict[str, Any]:
        """FVU by both kinds of selection, and which latents fire at the threshold."""
        codes, trained = self.codes(self.theta), self.trained(self.test)
        fired, never, gone = codes > 0, self.pools.ever == 0, (self.pools.ever > 0) & (self.pools.last == 0)
        outside, total = fired & ~self.pool, fired.sum()
        y, y_hat = self.test - self.sae.b_dec, self.sae.decode(codes) - self.sae.b_dec
        scale = float((y * y_hat).sum() / y_hat.square().sum())
        errors = (y - y_hat).square().sum(1).sort(descending=True).values
        energy = torch.where(outside, codes, 0).square().sum(0)
        loudest = highest(energy[None], math.ceil(len(energy) / 100))[0] & (energy > 0)
        cosine = torch.nn.functional.cosine_similarity(self.sae.W_dec, self.pools.W_dec)
        return {
            "trained": {"fvu": self.fvu(trained), "l0": float((trained > 0).sum() / len(trained))},
            "threshold": self.at(self.theta),
            "pool": int(self.pool[0].sum()),
            "ever_pooled": int((~never).sum()),
            "pooled_in_last_tenth": int((self.pools.last > 0).sum()),
            "firing_latents": int(fired.any(0).sum()),
            "firings": {
                "outside_pool": float(outside.sum() / total),
                "never_pooled": float(fired[:, never].sum() / total),
                "not_in_last_tenth": float(fired[:, gone].sum() / total),
            },
            "mean_value": {
                "threshold": self.theta,
                "outside_pool": _mean(codes[outside]),
                "inside_pool": _mean(codes[fired & self.pool]),
                "trained": _mean(trained[trained > 0]),
            },
            "cosine_with_start": float((cosine * fired.sum(0)).sum() / total),
            "pair_cosine": {"threshold": self.pair_cosine(codes), "trained": self.pair_cosine(trained)},
            "share_of_x": float((y * y_hat).sum() / y.square().sum()),
            "best_scale": {"scale": scale, "fvu": self.fvu(scale * codes)},
            "error_of_worst_1%_of_tokens": float(errors[: len(errors) // 100].sum() / errors.sum()),
            "without_outside_pool": self.at(self.theta, self.pool),
            "without_loudest_1%_of_latents": self.at(self.theta, ~loudest),
        }

    def remedies(self) -> dict[str, Any]:
        """FVU and L0 with other rules for inference."""
        last, size = self.pools.last / self.pools.counted, int(self.pool[0].sum())
        inside = self.calibrated(self.other_pool)
        found = {"pool_of_batch": self.at(inside, self.pool), "threshold_of_pools": self.at(inside)}
        for share in (0.01, 0.1, 0.5):
            if int((last >= share).sum()) >= self.config.k:
                found[f"pooled_in_{share:.0%}"] = self.closing(last >= share)
        found["ever_pooled"] = self.closing(self.pools.ever > 0)
        for times in (1, 2):
            kept = highest(last[None], min(self.config.d_sae, times * size))[0]
            found[f"inference_size_{times}"] = self.closing(kept)
        found["threshold_per_latent"] = self.at(self.own_thresholds())
        return {"remedies": found}

    def own_thresholds(self) -> Tensor:
        """[d_sae]: each latent fires on as many calibration tokens as with training-time selection there."""
        fired = (self.trained(self.calibration) > 0).sum(0)
        values = self.other.sort(dim=0, descending=True).values
        least = values.gather(0, fired.clamp_max(len(values) - 1)[None])[0].clamp_min(0)
        return torch.where(fired > 0, least, torch.inf)

    def pair_cosine(self, codes: Tensor) -> float:
        """Mean cosine of two decoder rows that fire on the same token, over the first 256 tokens."""
        fires = (codes[:256] > 0).float()
        count, rows = fires.sum(1), self.sae.W_dec / self.sae.W_dec.norm(dim=1, keepdim=True)
        pairs = (fires @ rows).square().sum(1) - count
        return float(pairs.sum() / (count * (count - 1)).sum().clamp_min(1))


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def rounded(value: Any) -> Any:
    """Numbers to four significant digits, in nested dictionaries too."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


COLUMNS = {
    "FVU, training-time selection": ("trained", "fvu"),
    "FVU": ("threshold", "fvu"),
    "firings outside the pool": ("firings", "outside_pool"),
    "... of latents never in a pool": ("firings", "never_pooled"),
    "latents ever in a pool": ("ever_pooled",),
    "FVU, inference_size=1": ("remedies", "inference_size_1", "fvu"),
}


def table(runs: list[dict[str, Any]]) -> str:
    """Means over seeds, with the range for FVU; one line per method."""
    lines = [f"| method | seeds | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) + 1)]
    for method in [name for name in METHODS if any(one["method"] == name for one in runs)]:
        same = [one for one in runs if one["method"] == method]
        cells = [_cell(path, [_at(one, path) for one in same]) for path in COLUMNS.values()]
        lines.append(f"| {method} | {len(same)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _at(one: Any, path: tuple[str, ...]) -> float:
    for name in path:
        one = one[name]
    return float(one)


def _cell(path: tuple[str, ...], values: list[float]) -> str:
    mean = float(np.mean(values))
    if path[0] == "firings":
        return f"{mean:.1%}"
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})" if path[-1] == "fvu" else f"{mean:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acts", type=Path, default=Path("acts.npy"), help="written if it does not exist")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="print the table of the file")
    a = parser.parse_args()
    done = json.loads(a.out.read_text())["runs"] if a.out.exists() else []
    if a.table:
        print(table(done))
        return
    if not a.acts.exists():
        harvest(a.acts)
    rows = torch.from_numpy(np.load(a.acts))
    for seed in a.seeds:
        for method in a.methods:
            if any((one["method"], one["seed"]) == (method, seed) for one in done):
                continue
            done.append(rounded(run(rows[-TRAINED:], rows[:-TRAINED], method, SETTING, seed)))
            lines = ",\n".join(json.dumps(one) for one in done)
            a.out.write_text(f'{{"setting": {json.dumps(SETTING)},\n"runs": [\n{lines}\n]}}\n')
            print(method, seed, done[-1]["trained"], done[-1]["threshold"], flush=True)


if __name__ == "__main__":
    main()
