"""Damaged files and odd arguments through the command line, in processes of their own.

Allowed are exit code 0, and exit code 2 with one line on stderr that begins with `error:`. Of a file with a checksum,
exit code 0 must come with the output of the undamaged file.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.data import array_damage
from tests.fuzz.mutate import binary_damage, json_damage, lines_damage
from tests.fuzz.run import Failure
from tests.fuzz.targets import build
from tests.fuzz.training import CHECKPOINT, NAMES

LIMIT = 120.0
TRAIN = (
    "--steps",
    "12",
    "--batch-size",
    "32",
    "--heldout-tokens",
    "64",
    "--d-sae",
    "48",
    "--k",
    "4",
    "--device",
    "cpu",
)
TRAIN += ("--log-every", "2", "--checkpoint-every", "4")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
Words = Sequence[str]


class Command(NamedTuple):
    """A command and the files that it reads, in a copy of the undamaged files."""

    words: Words
    files: dict[str, Callable[[bytes, Any], Any]]
    sealed: bool = False
    """Whether exit code 0 must come with the usual output, or with a line that names the file."""


FIRST = f"run/saes/{NAMES[0]}"
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
        ("eval", FIRST, "--model", "missing-model", "--text", "text/a.jsonl", "--device", "cpu"),
        {f"{FIRST}/sampled_sae.json": json_damage, f"{FIRST}/cfg.json": json_damage},
    ),
    Command(
        ("browse", FIRST, "--model", "missing-model", "--text", "text/a.txt", "--out", "browser"),
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
]
"""Those of eval and browse without a checksum end before a model is loaded: there is none of that name."""
ODD = (
    "",
    "-1",
    "0",
    "nan",
    "1e999",
    "9" * 400,
    "x",
    "\x1b[31m\n",
    "n" * 5000,
    "é\u202e",
    "../..",
    "/dev/null",
    "None",
    "[]",
    "--",
    "-",
    "=",
    "batchtopk:k=",
    "sampled:l=nan",
    "sampled:score=l2/entropy,l=5/5",
    "topk:k=1/1",
    "a:b:c",
)
FLAGS = {
    "train": (
        "--tokens",
        "--steps",
        "--d-sae",
        "--k",
        "--methods",
        "--seeds",
        "--configs",
        "--batch-size",
        "--layer",
        "--heldout-tokens",
        "--log-to",
        "--device",
        "--key",
        "--optimizer.lr",
        "--auxk.k",
        "--preset",
        "--model",
    ),
    "compare": ("--device", "--threshold", "--unique", "--matching", "--across", "--at-once"),
    "report": ("--model", "--layer", "--out"),
    "eval": ("--evals", "--text", "--model", "--layer", "--core.contexts", "--probing.k", "--device", "--model-dtype"),
    "merge": ("--out",),
    "synthetic": ("--preset", "--seeds", "--scores", "--multipliers", "--steps", "--only", "--data"),
    "cache": ("--model", "--text", "--tokens", "--layer", "--out", "--context", "--seed"),
}


def prepare(root: Path) -> None:
    """Undamaged files, with a run that the command line can resume."""
    import contextlib

    import numpy as np

    import sampled_sae as ss
    from sampled_sae.evals.core.schema import CoreConfig
    from tests.fuzz.target import rows
    from tests.fuzz.training import Stop

    if not (root / "arrays").exists():
        build(root)
    if not (root / "lm").exists():
        from tests.models.tiny_models import make_model, save

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


def run_commands(root: Path, inputs: int, seed: str = "0", at_once: int = 2) -> list[Failure]:
    """Run that many commands; prints failures and a summary."""
    prepare(root)
    begin, usual = time.monotonic(), {}
    for number, command in enumerate(COMMANDS):
        if command.sealed:
            usual[number] = _outcome(*_run(root, command.words, None, b""))[2]
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda n: _one(root, f"{seed}/{n}", usual), range(inputs)))
    verdicts = Counter(verdict for verdict, _ in found)
    failures = [failure for _, failure in found if failure is not None]
    for failure in failures:
        print(
            f"{failure.target}, {failure.file}: {failure.where}\n    {failure.what} [{failure.seed}]\n{failure.detail}"
        )
    shown = ", ".join(f"{count} {name}" for name, count in verdicts.most_common())
    print(f"{inputs} commands in {time.monotonic() - begin:.0f} s: {shown}")
    return failures


def _one(root: Path, seed: str, usual: dict[int, str]) -> tuple[str, Failure | None]:
    draw = random.Random(seed)
    if draw.random() < 0.3:
        name = draw.choice(list(FLAGS))
        words = [
            name,
            *(word for _ in range(draw.choice([1, 2])) for word in (draw.choice(FLAGS[name]), draw.choice(ODD))),
        ]
        words += draw.choice([[], ["--out", "new"], ["arrays/a.npy", "--out", "new"]])
        file, damaged, number, where = None, b"", -1, " ".join(words)
    else:
        number = draw.randrange(len(COMMANDS))
        command = COMMANDS[number]
        file, make = draw.choice(list(command.files.items()))
        damage = make((root / file).read_bytes(), draw)
        words, damaged, where = list(command.words), damage.content, damage.where
    finished, made = _run(root, words, file, damaged)
    verdict, what, output = _outcome(finished, made)
    if verdict == "success" and number in usual and output != usual[number]:
        named = file is not None and Path(file).name in finished.stderr
        verdict, what = ("noted", "") if named else ("failed", "exit code 0 with another output")
    if verdict != "failed":
        return verdict, None
    detail = "" if finished is None else finished.stderr[-1500:]
    return verdict, Failure(f"sampled-sae {words[0]}", file or "arguments", f"{where:.200}", what, seed, detail)


def _run(root: Path, words: Words, file: str | None, damaged: bytes) -> tuple[Any, str]:
    """The finished process (none after LIMIT seconds), and a digest of what it wrote."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "files"
        shutil.copytree(root, copy)
        if file is not None:
            (copy / file).write_bytes(damaged)
        before = {path for path in copy.rglob("*") if path.is_file()}
        package = str(Path(__file__).parents[2])
        try:
            finished = subprocess.run(
                [sys.executable, "-m", "sampled_sae", *(word.replace("\x00", "") for word in words)],
                cwd=copy,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": package},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        made = sorted(path for path in copy.rglob("sae_weights.safetensors") if path not in before)
        for pattern in ("compared/*.csv", "tables/*.csv", "reported/tables/*.csv", "browser/**/*.js"):
            made += sorted(copy.glob(pattern))
        here = str(copy).encode()
        return finished, "".join(f"{path.name}{path.read_bytes().replace(here, b'HERE')!r}" for path in made)


def _outcome(finished: Any, made: str) -> tuple[str, str, str]:
    """Verdict, what is wrong, and the output without times and folders."""
    if finished is None:
        return "failed", f"hangs: more than {LIMIT:g} s", ""
    if finished.returncode == 0:
        return "success", "", made
    lines = [line for line in finished.stderr.split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if finished.returncode != 2 or "Traceback" in finished.stderr:
        return "failed", f"exit code {finished.returncode}", ""
    if len(errors) != 1 or lines[-1] != errors[0]:
        return "failed", "not one line on stderr", ""
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", errors[0]):
        return "failed", "control characters in the error", ""
    return "refused", "", ""
