"""Train SAEs with sampled-sae at its defaults and with its peers at their best learning rates, on the same batches.

    make quality                                                   CPU, a few minutes
    python benchmarks/quality.py main --text T --select-text S --report-text R --probing FILE... --out DIR

Each peer trains with its own step, warm-up and decay (benchmarks/peers.py). Its learning rate is selected on
`select_tokens` tokens, in factors of 2 until both neighbors of the best are worse; the best rate runs at full length.
With `--neighbors`, the search goes on at full length.
All SAEs are converted to `SAE`, their thresholds calibrated to a mean L0 of K on held-out tokens, and measured alike.
Each finished run is a line of DIR/runs.jsonl and is not repeated; a kill loses the run in progress.

Peers come from .peers/NAME if that exists (tests/peers/setup.sh), each run in a process of its own, and else from
this Python, .carry/peers included (benchmarks/carry_peers.sh). Peers that are missing are named and left out.
benchmarks/quality_table.py draws the tables and the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import quality_train
import torch
from quality_data import Batches, Data, Texts, harvest, tokenize
from quality_evaluate import absorption, losses, probing
from quality_runs import PRESETS, STARTS, Results, best_rate, key, next_rate
from torch import Tensor

import sampled_sae as ss
from sampled_sae.method.architectures import InferenceConfig
from sampled_sae.method.presets import DEFAULT_METHODS, parse_methods
from sampled_sae.models.language_model import LanguageModel
from sampled_sae.models.load import load_model
from sampled_sae.sae import SAE
from sampled_sae.training.heldout import by_threshold, calibrated_threshold
from sampled_sae.utils.system import git_commit, versions

ROOT = Path(__file__).parent.parent
OURS = "sampled-sae"
METHODS = {OURS: DEFAULT_METHODS, "sampled-sae-batchtopk": ("batchtopk",)}
"""Our methods: the default, and plain BatchTopK, which the peers train."""
RECENT = 2**20  # the last training tokens; a latent that fires on none of them is dead
Line = dict[str, Any]


def converted(tensors: dict[str, Tensor], k: int, device: str, architecture: str = "jumprelu") -> SAE:
    """A peer's SAE as ours. For jumprelu, decoder rows are scaled to norm 1, which a top K would not survive."""
    d_sae, d_in = tensors["W_dec"].shape
    sae = SAE(InferenceConfig(d_in, d_sae, architecture, k), device=device)
    norm = tensors["W_dec"].float().norm(dim=1).clamp_min(1e-12)
    norm = norm if architecture == "jumprelu" else torch.ones_like(norm)
    with torch.no_grad():
        sae.W_enc.copy_(tensors["W_enc"] * norm)
        sae.b_enc.copy_(tensors["b_enc"] * norm)
        sae.W_dec.copy_(tensors["W_dec"] / norm[:, None])
        sae.b_dec.copy_(tensors["b_dec"])
        if "threshold" in tensors:
            sae.threshold.fill_(float(tensors["threshold"]))
    return sae


class Comparison:
    """One setting: its data, loaded when a run needs it, and its runs."""

    def __init__(self, name: str, a: argparse.Namespace, results: Results, before: Comparison | None):
        """`before`: another setting, whose data is used again where it is the same."""
        self.name, self.setting, self.a, self.results = name, PRESETS[name], a, results
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.peers = {n: t for n, t in quality_train.toolkits(self.device == "cuda").items() if n in a.peers}
        self._model: LanguageModel | None = None
        self._texts: Texts | None = None
        self._data: Data | None = None
        same = ("model", "context", "batch", "buffer_tokens", "calibration", "select", "report")
        s = self.setting
        if before is not None and all(getattr(s, name) == getattr(before.setting, name) for name in same):
            self._model, self._texts = before._model, before._texts
            alike = (s.layer, s.high_norm_factor) == (before.setting.layer, before.setting.high_norm_factor)
            if alike and s.tokens <= before.setting.tokens:
                self._data = before._data

    # ---- data ---------------------------------------------------------------------------------------

    @property
    def model(self) -> LanguageModel:
        if self._model is None:
            dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
            self._model = load_model(self.a.model or self.setting.model, self.device, dtype)
        return self._model

    @property
    def texts(self) -> Texts:
        if self._texts is None:
            s, a = self.setting, self.a
            path = a.out / f"contexts-{Path(s.model).name}-{s.context}.npz"
            self._texts = tokenize(self.model, s, (a.text, a.select_text, a.report_text), path)
        return self._texts

    @property
    def data(self) -> Data:
        if self._data is None:
            apart = self.device == "cpu" or any(self.interpreter(n) for n in self.peers)
            begin = time.perf_counter()
            self._data = harvest(self.model, self.setting, self.texts, self.a.out / "activations" if apart else None)
            tokens = len(self._data.train)
            print(f"{self.name}: {tokens:,} tokens in {time.perf_counter() - begin:.1f} s", flush=True)
        return self._data

    # ---- one run ------------------------------------------------------------------------------------

    def interpreter(self, toolkit: str) -> Path | None:
        """Python of the peer's own environment, if it has one."""
        own = ROOT / ".peers" / self.peers[toolkit].package / "bin" / "python"
        return own if own.exists() else None

    def run(self, toolkit: str, lr: float | None, tokens: int, seed: int = 0, again: bool = False) -> Line:
        """Train and measure, unless that is done already. With `again`, train for the SAE alone, without a new line."""
        about = key(self.setting, toolkit, lr, tokens, seed)
        if (line := self.results.get(about)) is not None and not again:
            return line
        if toolkit in METHODS:
            sae, seconds = self.train_ours(toolkit, tokens, seed)
            found = self.measured(sae) | {"lr": getattr(sae.cfg.training.optimizer, "lr", None)}  # type: ignore[union-attr]
        else:
            tensors, seconds = self.train_peer(toolkit, about)
            found, sae = self.measured_peer(toolkit, tensors)
            del tensors
        if tokens == self.setting.tokens:
            recent = by_threshold(sae, self.data.train[:tokens][-RECENT:])
            found["dead"] = float((recent.frequency == 0).float().mean())
            sae.save(self.folder(about))
        del sae
        if self.device == "cuda":
            torch.cuda.empty_cache()
        found = {"seconds": seconds} | found
        line = found if again else self.results.add(about, found)
        rate = "" if lr is None else f" lr {lr:.3g}"
        print(f"{self.name}: {toolkit}{rate}, {tokens:,} tokens, {seconds:.1f} s: {line['fvu']}", flush=True)
        return line

    def folder(self, about: dict[str, Any]) -> Path:
        """Where the SAE of a full-length run is saved."""
        parts = [f"{name}{value}" for name, value in about.items() if name not in ("context", "buffer_tokens")]
        folder: Path = self.a.out / "saes" / "-".join(parts).replace("/", "_")
        return folder

    def train_ours(self, toolkit: str, tokens: int, seed: int) -> tuple[SAE, float]:
        """`ss.train` with the defaults of a method: nothing is tuned."""
        s, data, steps = self.setting, self.data, tokens // self.setting.batch
        (config,) = parse_methods(METHODS[toolkit], d_sae=s.d_sae, k=s.k)

        def trained(steps: int) -> SAE:
            return ss.train(  # type: ignore[no-any-return]
                Batches(data, s.batch), config, steps=steps, batch_size=s.batch, seed=seed, device=self.device,
                progress=False,
            )  # fmt: skip

        if self.device == "cuda":  # compile kernels
            trained(20)
            torch.cuda.synchronize()
        begin = time.perf_counter()
        sae = trained(steps)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return sae, time.perf_counter() - begin

    def train_peer(self, toolkit: str, about: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
        """The peer's run, in its own environment if it has one."""
        python, data = self.interpreter(toolkit), self.data
        if python is None:
            return quality_train.train(self.peers[toolkit], data.train, about, self.device)
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory(dir=self.a.out) as folder:
            job = about | {"device": self.device, "activations": str(data.file), "rows": len(data.train)}
            job |= {"d_in": data.train.shape[1], "dtype": str(data.train.dtype).removeprefix("torch.")}
            job |= {"out": f"{folder}/sae.safetensors", "threads": torch.get_num_threads()}
            Path(folder, "job.json").write_text(json.dumps(job))
            command = [str(python), str(ROOT / "benchmarks" / "quality_train.py"), f"{folder}/job.json"]
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            return load_file(job["out"], self.device), json.loads(done.stdout.splitlines()[-1])["seconds"]

    # ---- measurements -------------------------------------------------------------------------------

    def measured(self, sae: SAE) -> Line:
        """Calibrate the threshold, in place; FVU and L0 on the held-out sets."""
        sets = self.data.sets
        sae.threshold.fill_(calibrated_threshold(sae, sets["calibration"], self.setting.k))
        found = {name: by_threshold(sae, x) for name, x in sets.items() if name != "calibration"}
        fvu = {name: round(math.nan if r.fvu is None else r.fvu, 6) for name, r in found.items()}
        return {"fvu": fvu, "l0": {name: round(r.l0, 3) for name, r in found.items()}}

    def measured_peer(self, toolkit: str, tensors: dict[str, Tensor]) -> tuple[Line, SAE]:
        """The same for a peer, and with its own inference: its own threshold, or the top K of each token.

        `fvu` is that of a top K for peers that have one; returns the SAE as it is evaluated further.
        """
        sets, sae = self.data.sets, converted(tensors, self.setting.k, self.device)
        own = sae if "threshold" in tensors else None
        if self.peers[toolkit].topk:
            own = converted(tensors, self.setting.k, self.device, "topk")
        line: Line = {}
        if own is not None:
            found = {name: by_threshold(own, x) for name, x in sets.items() if name != "calibration"}
            line = {
                "own_fvu": {name: round(math.nan if r.fvu is None else r.fvu, 6) for name, r in found.items()},
                "own_l0": {name: round(r.l0, 3) for name, r in found.items()},
            }
        line = self.measured(sae) | line
        if own is None or not self.peers[toolkit].topk:
            return line, sae
        at_threshold = {"threshold_fvu": line["fvu"], "threshold_l0": line["l0"]}
        return line | at_threshold | {"fvu": line["own_fvu"], "l0": line["own_l0"]}, own

    # ---- parts --------------------------------------------------------------------------------------

    def start(self, toolkit: str) -> float:
        """The best rate of the setting before this one, or the first rate of all."""
        for line in reversed(self.results.lines):
            if line["what"] == "selected" and line["key"]["toolkit"] == toolkit:
                return float(line["lr"])
        return STARTS[toolkit] * self.setting.start_factor

    def select(self) -> None:
        """Search each peer's learning rate; ours run once, at their default."""
        tokens = self.setting.select_tokens
        for toolkit in METHODS:
            self.run(toolkit, None, tokens)
        for toolkit in list(self.peers):
            about = key(self.setting, toolkit, None, tokens)
            start = self.start(toolkit)
            try:
                while (rate := next_rate(self.results.rates(self.setting, toolkit, tokens), start)) is not None:
                    self.run(toolkit, rate, tokens)
            except (ImportError, subprocess.CalledProcessError) as error:
                print(f"{toolkit}: left out ({error})", file=sys.stderr)
                del self.peers[toolkit]
                continue
            found = {"lr": best_rate(self.results.rates(self.setting, toolkit, tokens))}
            if (self.results.get(about, "selected") or {}).get("lr") != found["lr"]:
                self.results.add(about, found, "selected")

    def chosen(self) -> dict[str, list[float]]:
        """Rates for full length by peer: those of `--rates`, else the selected one of its better variant."""
        best: dict[str, tuple[float, str, float]] = {}
        for toolkit, peer in self.peers.items():
            selected = self.results.get(key(self.setting, toolkit, None, self.setting.select_tokens), "selected")
            if selected is not None:
                fvu = self.results.rates(self.setting, toolkit, self.setting.select_tokens)[selected["lr"]]
                best[peer.package] = min((fvu, toolkit, selected["lr"]), best.get(peer.package, (math.inf, "", 0.0)))
        given = {toolkit: rates for toolkit, rates in self.a.rates.items() if toolkit in self.peers}
        named = {self.peers[toolkit].package for toolkit in given}
        return given | {toolkit: [lr] for package, (_, toolkit, lr) in best.items() if package not in named}

    def full(self) -> None:
        """All toolkits at full length."""
        tokens = self.setting.tokens
        for toolkit in METHODS:
            for seed in range(self.a.seeds):
                self.run(toolkit, None, tokens, seed)
        for toolkit, rates in self.chosen().items():
            for lr in rates:
                self.run(toolkit, lr, tokens)
            while self.a.neighbors:  # lower ones first: longer runs prefer them
                further = next_rate(self.results.rates(self.setting, toolkit, tokens), rates[0], (-1, 1))
                if further is None:
                    break
                self.run(toolkit, further, tokens)
            for seed in range(1, self.a.peer_seeds):
                self.run(toolkit, best_rate(self.results.rates(self.setting, toolkit, tokens)), tokens, seed)

    def best_full(self) -> list[dict[str, Any]]:
        """Keys of the runs of full length to evaluate: all of ours, and the lowest FVU on `select` of each peer."""
        best: dict[Any, Line] = {}
        for line in self.results.lines:
            about = line["key"]
            toolkit = about.get("toolkit")
            if line["what"] != "run" or toolkit not in {*METHODS, *self.peers}:
                continue
            if toolkit not in METHODS and about["seed"]:
                continue
            if about == key(self.setting, toolkit, about["lr"], self.setting.tokens, about["seed"]):
                which = (toolkit, about["seed"]) if toolkit in METHODS else self.peers[toolkit].package
                if which not in best or line["fvu"]["select"] < best[which]["fvu"]["select"]:
                    best[which] = line
        return [line["key"] for line in best.values()]

    def evaluate(self) -> None:
        """CE loss recovered, probing and absorption of the best SAEs of full length, a line for each as it is done.

        An SAE that is not there, because its run came from another machine, is trained again.
        """
        s, measures = self.setting, dict[str, Callable[[list[SAE]], list[Line]]]()
        if not self.a.no_loss:
            contexts = torch.from_numpy(self.texts["report"][: s.loss].astype("int64"))
            measures["ce_recovered"] = lambda saes: losses(saes, self.model, s.layer, contexts, self.data.limit)
        if self.a.probing:
            measures["probing"] = lambda saes: probing(saes, self.model, s.layer, self.a.probing)
        if s.words != 0:
            measures["absorption"] = lambda saes: absorption(saes, self.model, s.layer, s.words)
        for name, measure in measures.items():
            left = [about for about in self.best_full() if name not in self.results.evaluation(about)]
            for about in left:
                if not self.folder(about).exists():
                    self.run(about["toolkit"], about["lr"], about["tokens"], about["seed"], again=True)
            if left:
                saes = [SAE.load(self.folder(about), self.device) for about in left]
                for about, line in zip(left, measure(saes), strict=True):
                    self.results.add(about, line, "evaluation")


PARTS: dict[str, Callable[[Comparison], None]] = {
    "select": Comparison.select,
    "full": Comparison.full,
    "evaluate": Comparison.evaluate,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", choices=PRESETS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", help="text to train on; not needed if DIR holds its contexts")
    parser.add_argument("--select-text", help="text to select learning rates on; default: the beginning of --text")
    parser.add_argument("--report-text", help="text to report on; default: the beginning of --text")
    parser.add_argument("--model", help="path or name of the model; default: that of the preset")
    parser.add_argument("--peers", nargs="*", default=list(STARTS), choices=STARTS, help="peers and their variants")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--probing", nargs="*", default=[], help="datasets for probing: .jsonl, .parquet or .csv")
    parser.add_argument("--no-loss", action="store_true", help="leave out CE loss recovered")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of sampled-sae at full length")
    parser.add_argument("--peer-seeds", type=int, default=1, help="seeds of each peer's best rate at full length")
    parser.add_argument(
        "--rates", nargs="*", default=[], metavar="PEER=LR", help="rates at full length instead of the selected ones"
    )
    parser.add_argument(
        "--neighbors",
        action="store_true",
        help="search on at full length until both neighbors are worse",
    )
    a = parser.parse_args()
    given, a.rates = a.rates, {}
    for one in given:
        peer, _, lr = one.partition("=")
        if peer not in STARTS or not re.fullmatch(r"[\d.]+(e-?\d+)?", lr):
            parser.error(f"--rates {one}: must be PEER=LR, PEER one of {', '.join(STARTS)}")
        a.rates.setdefault(peer, []).append(float(lr))
    sys.path.append(str(ROOT / ".carry" / "peers"))
    a.out.mkdir(parents=True, exist_ok=True)
    results = Results(a.out / "runs.jsonl")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    origin = {"device": where, "versions": versions(), "git_commit": git_commit()}
    comparison = None
    for name in a.presets:
        results.add({"preset": name}, {"setting": asdict(PRESETS[name]), **origin}, "begun")
        comparison = Comparison(name, a, results, comparison)
        for part in a.parts:
            PARTS[part](comparison)


if __name__ == "__main__":
    main()
