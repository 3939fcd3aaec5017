"""Commands in processes of their own, and what may come of them.

Allowed are exit code 0, and exit code 2 with one line on stderr that begins with `error:`. Of a file with a checksum,
exit code 0 must come with the output of the undamaged file.
"""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sampled_sae import cli
from sampled_sae.utils.progress import show
from tests.fuzz.commands import COMMANDS, FLAGS, ODD, Words, prepare
from tests.fuzz.run import Failure

LIMIT = 120
OWN_INTERPRETER = 0.1
"""Share of the commands with an interpreter of their own; others are forked from one that has imported all packages."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
MADE = ("compared/*.csv", "tables/*.csv", "reported/tables/*.csv", "browser/**/*.js")
"""Files that a command writes, besides weights."""


def run_commands(root: Path, inputs: int, seed: str = "0", processes: int = 2) -> list[Failure]:
    """Run that many commands; prints failures and a summary."""
    prepare(root)
    torch.set_num_threads(1)
    for name in ("transformers", "plotly.graph_objects", "pyarrow.parquet", "yaml"):
        importlib.import_module(name)
    for name in cli.COMMANDS:
        cli.load(name)
    begin, failures = time.monotonic(), list[Failure]()
    verdicts: Counter[str] = Counter()
    bar = show(inputs, what="commands", unit="commands")
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        sealed = [number for number, command in enumerate(COMMANDS) if command.sealed]
        usual = dict(zip(sealed, pool.map(partial(_usual, root), sealed), strict=True))
        one = partial(_one, root, usual)
        for done, (verdict, failure) in enumerate(pool.map(one, (f"{seed}/{n}" for n in range(inputs))), start=1):
            verdicts[verdict] += 1
            if failure is not None:
                failures.append(failure)
                print(f"{failure.target}, {failure.file}: {failure.where}\n    {failure.what} [{failure.seed}]")
                print(failure.detail, flush=True)
            bar.update(done, f"{len(failures)} failures" if failures else "")
    bar.close()
    shown = ", ".join(f"{count} {name}" for name, count in verdicts.most_common())
    print(f"{inputs} commands in {time.monotonic() - begin:.0f} s: {shown}")
    return failures


def _usual(root: Path, number: int) -> str:
    """The output of a command without damage."""
    verdict, what, made = outcome(*execute(root, COMMANDS[number].words, None, b""))
    assert verdict == "success", f"{COMMANDS[number].words}: {what}"
    return made


def _one(root: Path, usual: dict[int, str], seed: str) -> tuple[str, Failure | None]:
    draw = random.Random(seed)
    if draw.random() < 0.3:
        name = draw.choice(list(FLAGS))
        right, flags, long = FLAGS[name].right.split(), FLAGS[name].flags.split(), FLAGS[name].long
        odd = [word for _ in range(draw.choice([1, 2])) for word in (draw.choice(flags), draw.choice(ODD))]
        words = [name, *draw.choice([right if long else [], right, right]), *odd]
        file, damaged, number, where = None, b"", -1, " ".join(words)
    else:
        number = draw.randrange(len(COMMANDS))
        command = COMMANDS[number]
        file, make = draw.choice(list(command.files.items()))
        damage = make((root / file).read_bytes(), draw)
        words, damaged, where = list(command.words), damage.content, damage.where
    finished, made = execute(root, words, file, damaged, draw.random() < OWN_INTERPRETER)
    verdict, what, output = outcome(finished, made)
    if verdict == "success" and number in usual and output != usual[number]:
        named = file is not None and Path(file).name in finished.stderr
        verdict, what = ("noted", "") if named else ("failed", "exit code 0 with another output")
    if verdict != "failed":
        return verdict, None
    return verdict, Failure(
        f"sampled-sae {words[0]}", file or "arguments", f"{where:.200}", what, seed, finished.stderr[-1500:]
    )


def execute(
    root: Path, words: Words, file: str | None, damaged: bytes, interpreter: bool = False
) -> tuple[subprocess.CompletedProcess[str], str]:
    """The finished process, and a digest of what it wrote."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "outer" / "inner" / "files"  # words may name ../..
        shutil.copytree(root, copy)
        if file is not None:
            (copy / file).write_bytes(damaged)
        before = {path for path in copy.rglob("*") if path.is_file()}
        run = interpreted if interpreter else forked
        finished = run([word.replace("\x00", "") for word in words], copy)
        made = sorted(path for path in copy.rglob("sae_weights.safetensors") if path not in before)
        made += [path for pattern in MADE for path in sorted(copy.glob(pattern))]
        here, digest = str(copy).encode(), hashlib.sha1()
        for path in made:
            digest.update(path.name.encode() + path.read_bytes().replace(here, b"HERE"))
        return finished, digest.hexdigest()


def interpreted(words: Words, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell does."""
    command = [sys.executable, "-m", "sampled_sae", *words]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    try:
        return subprocess.run(command, cwd=folder, timeout=LIMIT, env=env, check=False, **pipes)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -signal.SIGALRM, "", "")


def forked(words: Words, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a fork of this process."""
    log = folder.parent / "stderr.txt"
    child = os.fork()
    if child == 0:
        _become(words, folder, log)
    _, status = os.waitpid(child, 0)
    stderr = log.read_text(encoding="utf-8", errors="replace")
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), "", stderr)


def _become(words: Words, folder: Path, log: Path) -> None:
    """The command in this process, which ends."""
    code = 1
    try:
        signal.alarm(LIMIT)
        files = [os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDWR), os.open(log, os.O_RDWR | os.O_CREAT)]
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
        os.chdir(folder)
        os.environ.update(ENVIRONMENT)
        sys.argv = ["sampled-sae", *words]
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def outcome(finished: subprocess.CompletedProcess[str], made: str) -> tuple[str, str, str]:
    """Verdict, what is wrong, and the output."""
    if finished.returncode == -signal.SIGALRM:
        return "failed", f"hangs: more than {LIMIT} s", ""
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
