"""Trainings that are the same on one process and on several, and how to start these."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load

import sampled_sae as ss
from sampled_sae.data.model_source import model_activations
from sampled_sae.training.run import Callback
from sampled_sae.utils.ranks import leave, own_rank

ROOT = Path(__file__).parents[2]
VOLATILE = ("seconds", "tokens_per_second", "checksum", "versions", "git_commit")
COMMON: dict[str, Any] = {"batch_size": 64, "heldout_tokens": 128, "log_every": 5, "checkpoint_every": 10}


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    fires = torch.rand(1000, 32, generator=generator) < 0.1
    return (fires * torch.rand(1000, 32, generator=generator)) @ torch.randn(32, 16, generator=generator)


def configs() -> list[ss.SAEConfig]:
    return [
        replace(ss.sampled(48, 4, "uniform", l=3), auxk=ss.AuxKConfig(dead_after=500)),
        ss.batchtopk(64, 4),
        ss.topk_then_batchtopk(48, 4),
        ss.topk(32, 4),
        replace(ss.batchtopk(48, 4, name="groups"), pool=ss.PoolConfig("l2", ss.Fraction(0.4), refresh=7)),
    ]


class Stop(Callback):
    """Stops a training in the middle of a step, as a crash does."""

    def on_batch(self, run: Any, step: int, x: Any) -> None:
        if step == 25:
            raise ss.Interrupted("stopped")


def tensors(out: Path, **more: Any) -> None:
    """Five SAEs on a tensor."""
    settings = COMMON | {"steps": 40, "device": "cpu", "resume": (out / "run.json").exists()}
    ss.train(rows(), configs(), out=out, progress=False, **settings, **more)


def stopped(out: Path, **more: Any) -> None:
    """The same until step 25, of which the checkpoint of step 20 is left."""
    try:
        tensors(out, callbacks=[Stop()], **more)
    except ss.Interrupted:
        return
    raise AssertionError("not stopped")


def texts() -> list[str]:
    return [f"the {word} thing, {n} times the other {n * n} " * 4 for n, word in enumerate(["a", "bc", "d"] * 40)]


def harvest(out: Path, signal_at: int | None = None, **more: Any) -> None:
    """Two SAEs at each of two hook points of a language model; several rounds of its buffer."""
    from tests.models.tiny_models import make_model, make_tokenizer

    model = ss.load_model((make_model("llama"), make_tokenizer()), device="cpu")
    if signal_at is not None:
        model.activations = _with_signal(model.activations, signal_at)
    hooks = {"layer": (0, 1), "context": 16, "buffer_tokens": 1024, "contexts_at_once": 5, "progress": False}
    settings = COMMON | {"steps": 30, "device": "cpu", "progress": False, "resume": out.exists()}
    ss.train(model_activations(model, texts(), **hooks), configs()[:2], out=out, **settings, **more)


def _with_signal(passes: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Passes through a model, during one of which a signal comes to one rank."""
    calls = iter(range(10**6))

    def one(*arguments: Any) -> Any:
        if next(calls) == number and own_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        return passes(*arguments)

    return one


def signaled(out: Path, **more: Any) -> None:
    """A signal to one rank while activations are collected stops all ranks at the same step, and they go on."""
    with pytest.raises(ss.Interrupted, match="interrupted at step"):
        harvest(out, signal_at=8, **more)
    harvest(out, **more)


def different(out: Path, **more: Any) -> None:
    """Activations that are not the same on all ranks."""
    with pytest.raises(ss.UserError, match="activations: rank 1 has others than rank 0"):
        ss.train(rows() + own_rank(), configs(), steps=3, out=out, device="cpu", progress=False, **COMMON, **more)


JOBS: dict[str, Callable[..., None]] = {
    "tensors": tensors,
    "stopped": stopped,
    "harvest": harvest,
    "signaled": signaled,
    "different": different,
}


def content(out: Path) -> dict[str, Any]:
    """All files of a finished training, without times and versions."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name not in (".lock",):
            data = path.read_bytes()
            if path.suffix == ".json":
                found[str(path.relative_to(out))] = _plain(json.loads(data))
            elif path.suffix == ".jsonl":
                found[str(path.relative_to(out))] = [_plain(json.loads(line)) for line in data.splitlines()]
            else:
                found[str(path.relative_to(out))] = data
    return found


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    """The same files with almost the same numbers: sums over latents are added in another order."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, bytes):
            a, b = load(found[name]), load(value)
            assert a.keys() == b.keys()
            for key in a:
                torch.testing.assert_close(a[key], b[key], rtol=0, atol=tolerance * float(b[key].abs().max() or 1))
        else:
            assert_near(found[name], value, name)


def assert_near(found: Any, wanted: Any, name: str) -> None:
    """JSON with numbers that are almost the same."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), name
        for key in wanted.keys() - {"checksums"}:
            assert_near(found[key], wanted[key], f"{name}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), name
        for a, b in zip(found, wanted, strict=True):
            assert_near(a, b, name)
    elif isinstance(wanted, float) and not isinstance(wanted, bool):
        assert abs(found - wanted) <= 1e-3 * max(1e-2, abs(wanted)), (name, found, wanted)
    else:
        assert found == wanted, name


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if name not in VOLATILE}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def torchrun(ranks: int, *words: Any, **options: Any) -> list[str]:
    """The command of torchrun for a module and its arguments; `options` are torchrun's own."""
    own = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *own]
    return [*launcher, "-m", *map(str, words)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def over_ranks(number: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in so many processes, with the variables that torchrun sets but without its own process.

    Forks need not import torch anew; but they cannot use a GPU that this process uses.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    method = "spawn" if torch.cuda.is_available() else "fork"
    started = mp.start_processes(_rank, (number, port, function, arguments), number, join=False, start_method=method)
    end = time.monotonic() + 600
    while not started.join(timeout=1):
        if time.monotonic() > end:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__} on {number} ranks")


def _rank(rank: int, number: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    function(*arguments)
    leave()


def run_jobs(number: int, folder: Path, *jobs: str) -> None:
    """Run jobs one after the other on so many ranks, each in `folder`/JOB."""
    over_ranks(number, _jobs, folder, jobs)


def _jobs(folder: Path, jobs: tuple[str, ...]) -> None:
    for job in jobs:
        name, _, divide = job.partition(":")
        JOBS[name](folder / job.replace(":", "-"), divide=divide or "auto")


def on_one_process(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of each job, without torchrun."""
    tensors(folder / "tensors")
    harvest(folder / "harvest")
    return {name: content(folder / name) for name in ("tensors", "harvest")}
