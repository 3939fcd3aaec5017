"""Why SAEs with constant pools have a higher FVU than BatchTopK (docs/results/pool-cause.json).

    python benchmarks/pool_cause.py --text TRAIN.jsonl --acts acts.npy --out pool-cause.json
    python benchmarks/pool_cause.py --out pool-cause.json --table --picture pool-cause.png

A pool restricts two things: which latents can be selected in a batch, and which are trained in a step. The methods
separate them, and each SAE is measured on held-out tokens with and without the pool. The time at which the pool is used
and the number of tokens that share one are varied too. A run that is in the file already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sampled_sae as ss
from sampled_sae.method.config import AuxKConfig, Constant, PoolConfig, Released, SAEConfig, Scope, Size
from sampled_sae.method.pools import PlainEncoder, draw
from sampled_sae.method.rate import default_lr
from sampled_sae.method.scores import get_score
from sampled_sae.method.selection import Outcome, Selection
from sampled_sae.reporting.figures import INK, base_figure
from sampled_sae.reporting.palette import PALE
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import as_trained, by_threshold, calibrated_threshold
from sampled_sae.training.learner import Learner
from sampled_sae.training.step import PlainPath

SETTING: dict[str, Any] = {
    "d_sae": 4096,
    "k": 16,
    "pool": 384,
    "wide": 1536,
    "steps": 1500,
    "batch_size": 1024,
    "dead_after": 0.4,
}
"""The pool has 9% of the latents and the wide one 37%, as at l = 100 in the study's settings `primary` and `small`.
`dead_after` is a share of the tokens, as in `primary`."""
CALIBRATION, TEST = 16_384, 32_768
"""Held-out tokens that thresholds are calibrated on, and that are measured."""
METHODS = {
    "batchtopk": "no pool",
    "l2": "a pool for each batch, the paper's method",
    "l2-wide": "the same with a wide pool",
    "prefix": "the same pool for all batches",
    "trained-pool": "no pool for selection, but only the latents of the batch's L2 pool are trained",
    "trained-pool-wide": "the same with a wide pool",
    "trained-random": "no pool for selection, but only as many random latents are trained",
    "late-50": "a pool in the last 50% of the steps only",
    "released-50": "a pool in the first 50% of the steps only",
    "released-90": "a pool in the first 90% of the steps only",
    "l2-groups-32": "a pool for each 32 tokens",
    "batchtopk-groups-32": "no pool; 32 tokens share a budget",
}


@dataclass(frozen=True, slots=True)
class Late(Constant):
    """All latents until a share of the steps is done, then the pool."""

    at: float = 0.5

    def size(self, start: int, d_sae: int, done: float) -> int:
        return start if done >= self.at else d_sae


def pool_size(method: str, setting: dict[str, Any]) -> int:
    """Latents in the pool of a method."""
    return int(setting["wide" if method.endswith("-wide") else "pool"])


def configuration(method: str, setting: dict[str, Any], factor: float, seed: int, d_in: int) -> SAEConfig:
    """One of METHODS at a factor of the default learning rate."""
    name, _, number = method.rpartition("-")
    d_sae, k, tokens = setting["d_sae"], setting["k"], setting["steps"] * setting["batch_size"]
    rate = default_lr(d_in, d_sae, k, setting["batch_size"], setting["steps"])
    auxk = AuxKConfig(dead_after=int(setting["dead_after"] * tokens))
    config = ss.batchtopk(d_sae, k, lr=factor * rate, auxk=auxk, seed=seed)
    pool = replace(config.pool, score="prefix" if method == "prefix" else "l2")
    if not method.startswith(("batchtopk", "trained")):
        pool = replace(pool, size=Size(pool_size(method, setting)))
    if name.endswith("groups"):
        pool = replace(pool, scope=Scope(tokens=int(number)))
    if name == "released":
        pool = replace(pool, schedule=Released(int(number) / 100))
    if name == "late":
        pool = replace(pool, schedule=Late(int(number) / 100))
    return replace(config, pool=pool)


def pooled(config: SAEConfig, size: int) -> SAEConfig:
    """The same with a constant L2 pool for each batch."""
    return replace(config, pool=PoolConfig("l2", Size(size)))


class TrainsPool(PlainPath):
    """Selects from all latents, and trains only those of a pool, and the dead ones that AuxK revives."""

    trained, size = "l2", 0

    def gradients(self, selection: Selection, dead: Tensor | None) -> Outcome:
        outcome, encoder = super().gradients(selection, dead), PlainEncoder(self.x, self.weights)
        q = encoder.scores(get_score(self.trained), len(self.x), self.generator, self.pool_state.score)
        trained = draw(q, self.size, "top", self.generator)[0]
        if dead is not None:
            trained[dead] = True
        outcome.gradients.b_enc.mul_(trained)
        for gradient in (outcome.gradients.W_enc, outcome.gradients.W_dec):
            gradient.mul_(trained[:, None])
        return outcome


def train(x: Tensor, config: SAEConfig, method: str, setting: dict[str, Any], seed: int) -> tuple[SAE, dict[str, Any]]:
    """An SAE of x [n, d_in], whose order the seed draws; how its pools changed."""
    learner = Learner(config, x.shape[1], setting["steps"], seed, x.device, torch.float32)
    if method.startswith("trained"):
        learner.path = path = TrainsPool(learner.weights, config, setting["steps"], learner.generator)
        path.trained, path.size = "uniform" if method == "trained-random" else "l2", pool_size(method, setting)
    order, size = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)), setting["batch_size"]
    churn = 0.0
    for step in range(setting["steps"]):
        batch = x[order[step * size : (step + 1) * size]].float()
        last = step == setting["steps"] - 1
        stats = learner.step(batch, step, measure=last)
        churn = float(stats.churn) if stats is not None else churn
    return learner.sae(), {"churn": churn, "ever_pooled": float(learner.ever_pooled.float().mean())}


def run(x: Tensor, held: Tensor, method: str, setting: dict[str, Any], factor: float, seed: int) -> dict[str, Any]:
    """Train on x [n, d_in], calibrate on the first third of `held` and measure on the rest."""
    config = configuration(method, setting, factor, seed, x.shape[1])
    sae, pools = train(x, config, method, setting, seed)
    third = len(held) // 3
    calibration, test, size = held[:third].float(), held[third:].float(), setting["batch_size"]
    sae.threshold.fill_(calibrated_threshold(sae, calibration, config.k))
    found = {"method": method, "factor": factor, "seed": seed, **pools}
    reconstruction = by_threshold(sae, test)
    found |= {"fvu": reconstruction.fvu, "live": float((reconstruction.frequency > 0).double().mean())}
    free = replace(config, pool=PoolConfig())
    for name, rule in {"free": free, "pooled": pooled(config, pool_size(method, setting))}.items():
        sae.cfg = replace(sae.cfg, training=rule)
        found[name] = as_trained(sae, test, size).fvu
    sae.cfg = replace(sae.cfg, training=free)
    used = [as_trained(sae, part, size).frequency for part in test.split(size)]
    return found | {"used": float(np.mean([int((frequency > 0).sum()) for frequency in used]))}


def harvest(path: Path, model: str, text: str, layer: int, count: int) -> None:
    """Write held-out tokens and, after them, so many training tokens, scaled to a mean square of 1 per element."""
    loaded = ss.load_model(model, "cpu", torch.bfloat16)
    source = ss.activations(loaded, text=text, layer=layer, context=512, buffer_tokens=2**19)
    held, spare = CALIBRATION + TEST, 4096  # tokens with a high norm are left out of those that are held out
    [stream] = source.open(4096, held + spare, 0, math.ceil(count / 4096)).values()
    batches = [stream.batch(step).float().clone() for step in range(math.ceil(count / 4096))]
    rows = torch.cat([stream.heldout.float()[:held], *batches])
    stream.close()
    np.save(path, (rows / rows.square().mean().sqrt()).half().numpy())


COLUMNS = {"FVU": "fvu", "FVU with a pool": "pooled", "latents used per batch": "used", "live": "live"}


def table(runs: list[dict[str, Any]]) -> str:
    """Means over seeds at the best rate of each method, with the ratio of FVU to BatchTopK's; one line per method."""
    lines = [f"| method | lr factor | ratio | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) + 2)]
    base = float(np.mean([one["fvu"] for one in best(runs, "batchtopk")]))
    for method in [name for name in METHODS if best(runs, name)]:
        same = best(runs, method)
        means = {column: float(np.mean([one[column] for one in same])) for column in COLUMNS.values()}
        cells = [_cell(column, value) for column, value in means.items()]
        lines.append(f"| {method} | {same[0]['factor']:g} | {means['fvu'] / base:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(runs: list[dict[str, Any]], path: Path) -> None:
    """FVU of each method at the threshold, and if a pool restricts each batch when it is measured; means over seeds."""
    shown = {method: best(runs, method) for method in METHODS if best(runs, method)}
    title = {"title": {"text": "FVU (right: worse)"}}
    figure = base_figure(90 + 30 * len(shown), title, {"autorange": "reversed"}, {"r": 16, "t": 40})
    how = {"fvu": ("inference threshold", "circle"), "pooled": ("restricted to a pool for each batch", "circle-open")}
    values = {column: [float(np.mean([one[column] for one in same])) for same in shown.values()] for column in how}
    for method, *ends in zip(shown, *values.values(), strict=True):
        figure.add_scatter(x=ends, y=[method] * 2, mode="lines", line={"color": PALE}, showlegend=False)
    for column, (name, symbol) in how.items():
        marks = {"color": INK, "symbol": symbol, "size": 9}
        figure.add_scatter(x=values[column], y=[*shown], mode="markers", marker=marks, name=name)
    figure.add_vline(x=values["fvu"][[*shown].index("batchtopk")], line={"color": INK, "width": 1})
    legend = {"orientation": "h", "y": 1.01, "yanchor": "bottom"}
    figure.update_layout(showlegend=True, legend=legend, paper_bgcolor="white", plot_bgcolor="white", width=760)
    figure.write_image(path, scale=1.5)


def best(runs: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """The runs of a method at the rate with the lowest FVU of seed 0."""
    same = [one for one in runs if one["method"] == method]
    first = min((one for one in same if one["seed"] == 0), key=lambda one: float(one["fvu"]), default=None)
    return [one for one in same if first is not None and one["factor"] == first["factor"]]


def next_factor(runs: list[dict[str, Any]], method: str) -> float | None:
    """The next factor of the learning rate to try with seed 0; None if both neighbors of the best one are worse."""
    tried = {one["factor"] for one in runs if (one["method"], one["seed"]) == (method, 0)}
    if not tried:
        return 1.0
    found = float(best(runs, method)[0]["factor"])
    return next((factor for factor in (found / 2, found * 2) if factor not in tried), None)


def _cell(column: str, value: float) -> str:
    return f"{value:.0f}" if column == "used" else f"{value:.0%}" if column == "live" else f"{value:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acts", type=Path, default=Path("acts.npy"), help="written if it does not exist")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="stdlib")
    parser.add_argument("--layer", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="rates are chosen with seed 0")
    parser.add_argument("--table", action="store_true", help="print the table of the file")
    parser.add_argument("--picture", type=Path, help="draw the results of the file")
    a = parser.parse_args()
    done = json.loads(a.out.read_text())["runs"] if a.out.exists() else []
    if (a.table or a.picture) and not best(done, "batchtopk"):
        parser.error(f"--out {a.out}: has no runs of batchtopk, which the table and the picture need")
    if a.table:
        print(table(done))
    if a.picture:
        picture(done, a.picture)
    if a.table or a.picture:
        return
    if not a.acts.exists():
        harvest(a.acts, a.model, a.text, a.layer, SETTING["steps"] * SETTING["batch_size"])
    rows = torch.from_numpy(np.load(a.acts))
    held, x = rows[: CALIBRATION + TEST], rows[CALIBRATION + TEST :]

    def add(method: str, factor: float, seed: int) -> None:
        done.append(rounded(run(x, held, method, SETTING, factor, seed)))
        lines = ",\n".join(json.dumps(one) for one in done)
        a.out.write_text(f'{{"setting": {json.dumps(SETTING)},\n"runs": [\n{lines}\n]}}\n')
        print(done[-1], flush=True)

    for method in a.methods:
        while (factor := next_factor(done, method)) is not None:
            add(method, factor, 0)
        for seed in a.seeds:
            if all(one["seed"] != seed for one in best(done, method)):
                add(method, best(done, method)[0]["factor"], seed)


def rounded(one: dict[str, Any]) -> dict[str, Any]:
    """Numbers to five significant digits."""
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in one.items()}


if __name__ == "__main__":
    main()
