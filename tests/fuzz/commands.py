"""Commands with damaged files or odd arguments; `processes.py` runs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sampled_sae as ss
from sampled_sae.evals.core.schema import CoreConfig
from tests.fuzz.data import array_damage
from tests.fuzz.formats import damage as weights_damage
from tests.fuzz.mutate import binary_damage, json_damage, lines_damage
from tests.fuzz.target import rows
from tests.fuzz.targets import build
from tests.fuzz.training import CHECKPOINT, NAMES, Stop
from tests.models.tiny_models import make_model, save

TRAIN = (
    *["--steps", "12", "--batch-size", "32", "--heldout-tokens", "64", "--d-sae", "48", "--k", "4", "--device", "cpu"],
    *["--log-every", "2", "--checkpoint-every", "4"],
)
Words = Sequence[str]


class Command(NamedTuple):
    """A command and the files that it reads, in a copy of the undamaged files."""

    words: Words
    files: dict[str, Callable[[bytes, Any], Any]]
    sealed: bool = False
    """Whether exit code 0 must come with the usual output, or with a line that names the file."""


FIRST = f"run/saes/{NAMES[0]}"
SPARSIFY, DICTIONARY = "formats/sparsify-groupmax", "formats/dictionary_learning-matryoshka"
COMMANDS = [
    Command(("train", "arrays/a.npy", "--out", "new", *TRAIN), {"arrays/a.npy": array_damage}),
    Command(("train", "arrays/a.pt", "--out", "new", *TRAIN), {"arrays/a.pt": array_damage}),
    Command(
        ("train", "cache", "--out", "new", *TRAIN),
        {"cache/shard-00001.safetensors": binary_damage, "cache/cache.json": json_damage},
        True,
    ),
    Command(
        ("train", "arrays/a.npy", "--configs", "configs/configs.json", "--out", "new", *TRAIN[:6], *TRAIN[10:]),
        {"configs/configs.json": json_damage},
    ),
    Command(
        ("train", "arrays/all.npy", "--methods", "batchtopk", "sampled:l=2", "--out", "resumed", "--resume", *TRAIN),
        {f"resumed/checkpoints/step-000000008/{name}": binary_damage for name in CHECKPOINT}
        | {"resumed/run.json": json_damage, "resumed/log.jsonl": lines_damage},
        True,
    ),
    Command(
        ("compare", "pair", "--out", "compared", "--device", "cpu"),
        {f"pair/{NAMES[0]}/{name}": binary_damage for name in ("sae_weights.safetensors", "sampled_sae.json")},
        True,
    ),
    Command(
        ("report", "sweep", "--out", "reported", "--no-figures"),
        {"sweep/run.json": json_damage, "sweep/log.jsonl": lines_damage},
    ),
    Command(
        ("report", "run", "--out", "reported", "--no-figures"),
        {f"{FIRST}/evals/{name}.json": json_damage for name in ("core", "probing", "absorption", "autointerp")}
        | {f"{FIRST}/sampled_sae.json": json_damage},
        True,
    ),
    Command(("sweep", "jobs/spec.json", "--dry-run"), {"jobs/spec.json": json_damage}),
    Command(("sweep", "jobs/spec.yaml", "--dry-run"), {"jobs/spec.yaml": binary_damage}),
    Command(("sweep", "status", "jobs"), {"jobs/sweep.json": json_damage, "jobs/jobs/a/job.json": json_damage}),
    Command(("report", "compare", "--out", "reported", "--no-figures"), {"compare/compare.json": json_damage}, True),
    Command(
        ("merge", "synthetic/one", "synthetic/two", "--out", "merged"), {"synthetic/one/results.json": json_damage}
    ),
    Command(
        ("eval", FIRST, "--model", "missing-model", "--layer", "1", "--text", "text/a.jsonl", "--device", "cpu"),
        {f"{FIRST}/sampled_sae.json": json_damage, f"{FIRST}/cfg.json": json_damage},
    ),
    Command(
        ("browse", FIRST, "--model", "missing-model", "--layer", "1", "--text", "text/a.txt", "--out", "browser"),
        {f"{FIRST}/sampled_sae.json": json_damage, f"{FIRST}/evals/explanations.json": json_damage},
    ),
    Command(
        ("eval", "lm", "--text", "text/long.txt", "--core.contexts", "2", "--out", "tables", "--device", "cpu"),
        {f"lm/saes/{NAMES[0]}/{name}": binary_damage for name in ("sae_weights.safetensors", "sampled_sae.json")}
        | {f"lm/saes/{NAMES[0]}/evals/core.json": json_damage},
        True,
    ),
    Command(
        (
            *("browse", f"lm/saes/{NAMES[0]}", "--text", "text/long.txt", "--tokens", "160", "--context", "16"),
            *("--out", "browser", "--device", "cpu"),
        ),
        {f"lm/saes/{NAMES[0]}/{name}": binary_damage for name in ("sae_weights.safetensors", "sampled_sae.json")}
        | {f"lm/saes/{NAMES[0]}/evals/core.json": json_damage},
        True,
    ),
    Command(("resume", "resumed"), {"resumed/train.json": json_damage, "resumed/run.json": json_damage}, True),
    Command(
        ("reproduce", "--scale", "tiny", "--out", "reproduce", "--only", "compare"),
        {"reproduce/reproduce.json": json_damage},
    ),
    Command(("study", "study/design.json"), {"study/design.json": json_damage}),
    Command(
        ("study", "study/design.json", "--do", "tables", "--out", "study", "--page", "page.md"),
        {
            "study/design.json": json_damage,
            "study/results.jsonl": lines_damage,
            "study/synthetic/finite.json": json_damage,
        },
    ),
    Command(
        ("eval", SPARSIFY, "--model", "missing-model", "--layer", "1", "--text", "text/a.txt", "--device", "cpu"),
        {f"{SPARSIFY}/layers.1/cfg.json": json_damage, f"{SPARSIFY}/layers.1/sae.safetensors": weights_damage},
    ),
    Command(
        ("convert", DICTIONARY, "new"),
        {f"{DICTIONARY}/config.json": json_damage, f"{DICTIONARY}/ae.pt": weights_damage},
    ),
    Command(
        ("browse", "sae", "--out", "page", "--serve", "--model", "missing-model", "--layer", "1"),
        {"page/browser.json": json_damage},
    ),
]
"""Those with missing-model end before a model is loaded: there is none of that name."""
ODD = ("", "-1", "0", "nan", "1e999", "9" * 400, "x", "\x1b[31m\n", "n" * 5000, "é\u202e", "../..", "/dev/null", "None")
ODD += ("[]", "--", "-", "=", "batchtopk:k=", "sampled:l=nan", "sampled:score=l2/entropy,l=5/5", "topk:k=1/1", "a:b:c")


class Flags(NamedTuple):
    """Flags of a command that are given odd values, after words that are right, or without them."""

    right: str
    flags: str
    long: bool = False
    """Whether the command takes long without the words that are right."""


FLAGS = {
    "train": Flags(
        "arrays/a.npy --out new",
        "--tokens --steps --d-sae --k --methods --seeds --configs --batch-size --layer --heldout-tokens --log-to "
        "--device --key --optimizer.lr --auxk.k --preset --model",
    ),
    "compare": Flags("pair --out new", "--device --threshold --unique --matching --across --at-once"),
    "report": Flags("sweep --out new --no-figures", "--model --layer --out"),
    "eval": Flags(
        "lm --text text/long.txt --core.contexts 2 --out new --device cpu",
        "--evals --text --model --layer --core.contexts --probing.k --device --model-dtype --hook",
    ),
    "merge": Flags("synthetic/one synthetic/two", "--out"),
    "synthetic": Flags(
        "--out new --preset demo --steps 2", "--preset --seeds --scores --multipliers --steps --only --data", True
    ),
    "cache": Flags("--out new", "--model --text --tokens --layer --out --context --seed --part"),
    "sweep": Flags("jobs/spec.json --dry-run", "--out --launcher --workers --device --gpus-per-job"),
    "study": Flags(
        "study/design.json --out new",
        "--do --out --page --figures --train-text --tokens --stages --words --until --device",
    ),
    "browse": Flags(
        f"lm/saes/{NAMES[0]} --text text/long.txt --tokens 160 --context 16 --out new --device cpu",
        "--other --compare --neuronpedia --text --tokens --context --model --layer --top --bins --near --samples",
    ),
    "convert": Flags(f"{FIRST} new", "--format --k"),
    "resume": Flags("resumed", "--extend --device --divide --load-scores"),
    "reproduce": Flags("--scale tiny --out new --dry-run", "--scale --only --skip --device --out", True),
}


def prepare(root: Path) -> None:
    """Undamaged files, with a run that the command line can resume."""
    if not (root / "arrays").exists():
        build(root)
    if not (root / "lm").exists():
        save(make_model("llama"), root / "model")
        text = root / "text" / "long.txt"
        text.write_text(" ".join(f"the{n * n % 97}" for n in range(3000)))
        before = Path.cwd()
        os.chdir(root)  # the names of model and text are saved with the SAEs
        source = ss.activations("model", "text/long.txt", layer=1, context=16, device="cpu", progress=False)
        ss.train(source, [ss.batchtopk(48, 4)], out="lm", steps=4, batch_size=32, heldout_tokens=64, device="cpu")
        ss.evaluate("lm", None, CoreConfig(contexts=2), text="text/long.txt", device="cpu")
        os.chdir(before)
    if not (root / "resumed").exists():
        np.save(root / "arrays" / "all.npy", rows().numpy())
        configs = [ss.batchtopk(48, 4, seed=0), ss.sampled(48, 4, l=2, seed=0)]
        settings = {"steps": 12, "batch_size": 32, "heldout_tokens": 64, "log_every": 2, "checkpoint_every": 4}
        with contextlib.suppress(KeyboardInterrupt, ss.UserError):
            ss.train(
                root / "arrays" / "all.npy",
                configs,
                out=root / "resumed",
                callbacks=[Stop()],
                progress=False,
                device="cpu",
                **settings,
            )
