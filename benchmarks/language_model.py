"""Compare methods on one layer of a language model, each at its best learning rate, on the same tokens.

python benchmarks/language_model.py tune rates full others final --model MODEL --text TEXT --heldout TEXT --out DIR

`tune` trains all methods on an eighth of the tokens at each of RATES. `rates` trains the CONTENDERS on all tokens at
the best of these, at half and at a quarter of it, because short runs prefer higher rates than long ones. `full` trains
the other methods at the fraction of their best short rate that was best for most contenders, `others` at the other
fractions, and `final` each method at its best rate, SEEDED ones with three seeds. Each part writes a JSON file to DIR
and reads those of the earlier parts. With --keep the SAEs are saved for further evaluation, and `final` does not train
again what `others` saved.

The figures in docs/language-models were measured with the recipe of version 0.1; this script uses the present one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import sampled_sae as ss
from sampled_sae.data.contexts import TextConfig, contexts
from sampled_sae.data.model_source import HarvestStream, model_activations
from sampled_sae.data.text import TextSource
from sampled_sae.evals.core.evaluate import evaluate_core_many
from sampled_sae.evals.core.schema import CoreConfig
from sampled_sae.method.config import Multiplier, PoolConfig, Released
from sampled_sae.method.presets import label
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.load import load_model
from sampled_sae.training.callbacks import Callback
from sampled_sae.training.heldout import by_threshold
from sampled_sae.training.learner import Learner, Stats
from sampled_sae.training.run import Run
from sampled_sae.utils.system import git_commit, versions

RATES = (3e-4, 6e-4, 1.2e-3, 2.4e-3)
CONTENDERS = ("BatchTopK", "uniform 50%, released at 70%", "TopK for 70%, then BatchTopK")
SHARES = (1.0, 0.5, 0.25)
SEEDED = ("BatchTopK", "TopK for 70%, then BatchTopK", "l2, l = 5", "entropy, l = 30", "uniform, l = 100")
TOO_SLOW = 4 / 3
"""If half of the best short rate increased FVU by more than this factor, a quarter of it is not tried on all tokens."""


def methods(m: int, k: int) -> dict[str, ss.SAEConfig]:
    """The compared configurations, by name."""
    found = {"BatchTopK": ss.batchtopk(m, k)}
    for score, ls in (("l2", (5, 30, 100)), ("entropy", (3, 30, 100)), ("uniform", (4, 100))):
        found |= {f"{score}, l = {l}": ss.sampled(m, k, score, l) for l in ls}
    for share in (0.25, 0.5):
        found[f"uniform {share:.0%}, released at 70%"] = ss.released(m, k, "uniform", share)
    for score in ("l2", "entropy"):
        pool = PoolConfig(score=score, size=Multiplier(30), schedule=Released(0.7))
        found[f"{score}, l = 30, released at 70%"] = ss.SAEConfig(m, k, pool=pool)
    found["TopK for 70%, then BatchTopK"] = ss.topk_then_batchtopk(m, k, until=0.7)
    return found


def at(config: ss.SAEConfig, rate: float, seed: int = 0) -> ss.SAEConfig:
    return replace(config, optimizer=replace(config.optimizer, lr=rate), seed=seed, name=None)


class Stopwatch(Callback):
    """Milliseconds of one SAE's step, measured at every fiftieth step."""

    def __init__(self) -> None:
        self.marks: dict[int, list[tuple[Any, Any]]] = {}
        self.last: Any = None

    def on_batch(self, run: Run, step: int, x: torch.Tensor) -> None:
        self.last = self._now() if step % 50 == 25 and x.is_cuda else None

    def on_step(self, run: Run, learner: Learner, step: int, stats: Stats | None) -> None:
        if self.last is not None:
            begin, self.last = self.last, self._now()
            self.marks.setdefault(id(learner.config), []).append((begin, self.last))

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, config: ss.SAEConfig) -> float | None:
        """The mean, including the harvest's share of the GPU."""
        pairs = self.marks.get(id(config))
        return sum(a.elapsed_time(b) for a, b in pairs) / len(pairs) if pairs else None


class Setting:
    """Model, text and sizes of the command line."""

    def __init__(self, a: argparse.Namespace):
        self.a = a
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        self.model: LanguageModel = load_model(a.model, self.device, torch.bfloat16 if cuda else torch.float32)
        self.text = TextConfig(a.context, bos=self.model.bos)

    def stream(self) -> HarvestStream:
        sizes = {"context": self.a.context, "buffer_tokens": self.a.buffer}
        source = model_activations(self.model, self.a.text, self.a.layer, **sizes)
        [stream] = source.open(self.a.batch, self.a.calibration, 0).values()
        return stream

    def train(self, configs: list[ss.SAEConfig], tokens: int) -> tuple[list[ss.SAE], dict[str, Any]]:
        """Train all on one stream -> the SAEs and their times."""
        steps, stream, begin = tokens // self.a.batch, self.stream(), time.perf_counter()
        opened = time.perf_counter() - begin
        watch = Stopwatch()
        saes = ss.train(stream, configs, steps=steps, batch_size=self.a.batch, device=self.device, callbacks=[watch])
        seconds = time.perf_counter() - begin
        self.heldout = stream.heldout.to(self.device)
        # Training tokens of the last block: memorization would show here.
        self.trained = torch.cat(
            [stream.batch(steps - 1 - i) for i in range(min(16, (steps - 1) % stream.harvest.rounds.batches + 1))]
        )
        each = [watch.milliseconds(sae.cfg.training) for sae in saes if sae.cfg.training]
        return saes, {"seconds": seconds, "open_seconds": opened, "steps": steps, "ms_a_step": each}

    def measure(self, saes: list[ss.SAE]) -> list[dict[str, Any]]:
        """Core evaluation on other text."""
        source = contexts(TextSource(self.a.heldout).documents(), self.model.tokenizer, self.text)
        tokens = torch.stack(list(islice(source, self.a.contexts)))
        settings = CoreConfig(put_in="normal", contexts_at_once=16, tokens_at_once=4096)
        return [r.to_dict() for r in evaluate_core_many(saes, self.model, self.a.layer, tokens, settings)]


def rows(s: Setting, names: list[str], saes: list[ss.SAE], took: dict[str, Any]) -> list[dict[str, Any]]:
    """One line of the table per SAE."""
    lines, results = [], s.measure(saes)
    for name, sae, ms, result in zip(names, saes, took["ms_a_step"], results, strict=True):
        assert sae.cfg.training is not None
        training = sae.cfg.metadata["training"]
        line = {
            "name": name,
            "lr": sae.cfg.training.optimizer.lr,
            "seed": sae.cfg.training.seed,
            "dead": training["dead"],
        }
        line |= {"ever_pooled": training["ever_pooled"], "path": training["path"], "ms_a_step": ms}
        line["seconds"] = None if ms is None else ms * took["steps"] / 1e3
        for where, x in (("heldout", s.heldout), ("trained", s.trained)):
            line[f"fvu_{where}"] = 1 - by_threshold(sae, x.float()).fve
        lines.append(line | {"config": sae.cfg.training.to_dict(), "core": result})
    return lines


def tune(s: Setting) -> dict[str, Any]:
    """An eighth of the tokens at each rate: FVU at the inference threshold on held-out tokens."""
    a = s.a
    pairs = [(name, rate) for name in methods(a.m, a.k) for rate in RATES]
    saes, took = s.train([at(methods(a.m, a.k)[name], rate) for name, rate in pairs], a.tokens // 8)
    lines = [
        {"name": name, "lr": rate, "fvu": 1 - by_threshold(sae, s.heldout).fve}
        for (name, rate), sae in zip(pairs, saes, strict=True)
    ]
    best = {n: min((li for li in lines if li["name"] == n), key=lambda li: li["fvu"])["lr"] for n in methods(a.m, a.k)}
    return {"took": took, "runs": lines, "best": best}


def rates(s: Setting) -> dict[str, Any]:
    """The contenders at their best short rate, half and a quarter of it; which of these was best for each."""
    best, listed = read(s, "tune")["best"], methods(s.a.m, s.a.k)
    pairs = [(name, share) for name in CONTENDERS for share in SHARES]
    configs = [at(listed[name], share * best[name]) for name, share in pairs]
    found = whole(s, [name for name, _ in pairs], configs)
    scored = [(name, share, fvu(line)) for (name, share), line in zip(pairs, found["runs"], strict=True)]
    shares = {n: min((x for x in scored if x[0] == n), key=lambda x: x[2])[1] for n in CONTENDERS}
    return found | {"best_share": shares}


def full(s: Setting) -> dict[str, Any]:
    """The other methods, at the fraction of their best short rate that was best for most contenders."""
    best, listed = read(s, "tune")["best"], methods(s.a.m, s.a.k)
    shares = list(read(s, "rates")["best_share"].values())
    share = max(shares, key=shares.count)
    names = [name for name in listed if name not in CONTENDERS]
    return {"share": share} | whole(s, names, [at(listed[name], share * best[name]) for name in names])


def others(s: Setting) -> dict[str, Any]:
    """The same at the other fractions, and contenders at twice the highest rate if that was their best."""
    tuned, listed = read(s, "tune"), methods(s.a.m, s.a.k)
    best, short = tuned["best"], {(line["name"], line["lr"]): line["fvu"] for line in tuned["runs"]}
    pairs = []
    for name in (name for name in listed if name not in CONTENDERS):
        half = short.get((name, best[name] / 2), 0.0)
        slow = half > TOO_SLOW * short[name, best[name]]
        shares = [share for share in SHARES if share != read(s, "full")["share"] and not (slow and share == SHARES[-1])]
        pairs += [(name, share * best[name]) for share in shares]
    # A contender that was best at the highest rate may be better at a higher one.
    pairs += [(name, 2 * best[name]) for name, share in read(s, "rates")["best_share"].items() if share == SHARES[0]]
    return whole(s, [name for name, _ in pairs], [at(listed[name], rate) for name, rate in pairs])


def final(s: Setting) -> dict[str, Any]:
    """Each method at its best rate; some with three seeds."""
    listed = methods(s.a.m, s.a.k)
    runs = [line for part in ("rates", "full", "others") for line in read(s, part)["runs"]]
    best = {name: min((line for line in runs if line["name"] == name), key=fvu)["lr"] for name in listed}
    pairs = [(name, seed) for name in listed for seed in ((0, 1, 2) if name in SEEDED else (0,))]
    configs = {pair: at(listed[pair[0]], best[pair[0]], pair[1]) for pair in pairs}
    again = [pair for pair in pairs if not (s.a.keep and place(s, configs[pair]).exists())]
    there = [line for line in read(s, "others")["runs"] if (line["name"], 0) not in again]
    there = [line for line in there if line["lr"] == best[line["name"]]]
    found = whole(s, [name for name, _ in again], [configs[pair] for pair in again])
    return found | {"runs": there + found["runs"]}


def read(s: Setting, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((s.a.out / f"{part}.json").read_text())
    return found


def fvu(line: dict[str, Any]) -> float:
    value: float = line["core"]["normal"]["fvu"]["value"]
    return value


def whole(s: Setting, names: list[str], configs: list[ss.SAEConfig]) -> dict[str, Any]:
    saes, took = s.train(configs, s.a.tokens)
    begin = time.perf_counter()
    lines = rows(s, names, saes, took)
    took["measure_seconds"] = time.perf_counter() - begin
    if s.a.keep:
        for sae in saes:
            assert sae.cfg.training is not None
            # The evaluations read model and text from here.
            sae.cfg.metadata.update({"model_name": s.a.model, "text": s.a.text})
            folder = place(s, sae.cfg.training)
            sae.cfg = replace(sae.cfg, training=replace(sae.cfg.training, name=folder.name))
            sae.save(folder)
    return {"took": took, "runs": lines}


def place(s: Setting, config: ss.SAEConfig) -> Path:
    """Folder of a saved SAE."""
    folder: Path = s.a.keep / f"lr-{config.optimizer.lr:g}" / f"{label(config)}-s{config.seed}"
    return folder


PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    part.__name__: part for part in (tune, rates, full, others, final)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", required=True)
    parser.add_argument("--heldout", help="text to measure on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="folder for the SAEs")
    sizes = {"layer": 12, "context": 512, "m": 65_536, "k": 60, "batch": 4096, "tokens": 25_000_000}
    for name, default in (sizes | {"buffer": 2**19, "calibration": 65_536, "contexts": 128}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(a)
    for part in a.parts:
        found = PARTS[part](setting)
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        origin = {"versions": versions(), "git_commit": git_commit(), "device": where}
        about = {
            "settings": {key: str(value) for key, value in vars(a).items() if key not in ("out", "keep")},
            **origin,
        }
        (a.out / f"{part}.json").write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
