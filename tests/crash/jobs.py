"""Small jobs that are disturbed: training, caching, evaluation, a page, a sweep. Each continues where it stopped."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import sampled_sae as ss
from sampled_sae.data.cache import write_cache
from sampled_sae.data.cache_index import Part
from sampled_sae.sweeps import launch
from sampled_sae.sweeps.spec import SweepConfig, completed
from sampled_sae.utils.errors import UserError
from tests.crash.workers import BUG, forked

VOLATILE = ("seconds", "tokens_per_second", "datetime_epoch_millis", "checksum", "versions", "git_commit")
VOLATILE += ("attempts", "worker")
"""JSON fields that differ from run to run: times, checksums over them, and who ran a job of a sweep how often."""
LOGS = (".lock", "log.txt")


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    fires = torch.rand(400, 32, generator=generator) < 0.1
    return (fires * torch.rand(400, 32, generator=generator)) @ torch.randn(32, 16, generator=generator)


def train(out: Path) -> None:
    """Two SAEs, 16 x 48, with three checkpoints."""
    configs = [ss.batchtopk(48, 4), ss.sampled(48, 4, "l2", 2)]
    settings: dict[str, Any] = {"steps": 12, "batch_size": 32, "heldout_tokens": 64, "log_every": 3}
    ss.train(rows(), configs, out=out, resume=True, device="cpu", progress=False, checkpoint_every=4, **settings)


def write(out: Path) -> None:
    """A cache of three shards."""
    data = rows().to(torch.bfloat16)
    write_cache(out, lambda start: iter([data[start:]]), 300, {"origin": "made up"}, shard_tokens=100)


def write_parts(out: Path) -> None:
    """The same cache, written by two processes, one after the other."""
    data = rows().to(torch.bfloat16)
    for number in (2, 1):
        origin = {"origin": "made up"}
        write_cache(out, lambda start: iter([data[start:]]), 300, origin, shard_tokens=100, part=Part(number, 2))


@cache
def model() -> Any:
    from tests.models.tiny_models import make_model, make_tokenizer

    return ss.load_model((make_model("llama"), make_tokenizer()), device="cpu")


@cache
def text() -> str:
    """A file of text, outside of the folder that is disturbed."""
    path = Path(tempfile.mkdtemp()) / "text.txt"
    path.write_text("".join(f"the {word} thing, {n} times the other " * 8 for n, word in enumerate(["a", "b"] * 4)))
    return str(path)


def evaluate(out: Path) -> None:
    """The core evaluation of two SAEs, which are trained first where they are missing."""
    train(out)
    from sampled_sae.evals.core.schema import CoreConfig

    config = CoreConfig(contexts=4, context=16)
    ss.evaluate([out], model(), [config], text=text(), out=out / "evals", layer=1, device="cpu")


def browse(out: Path) -> None:
    """The page of an SAE, which is trained first where it is missing."""
    train(out)
    ss.browse(
        out / "saes" / "batchtopk-s0", model(), text(), out / "page", tokens=160, context=16, layer=1, device="cpu"
    )


@cache
def spec() -> SweepConfig:
    """A cache of two shards, two jobs that read it, with one SAE each and its evaluation; model and text are outside of
    the folder that is disturbed."""
    from tests.models.tiny_models import make_model, make_tokenizer

    place = Path(tempfile.mkdtemp()) / "model"
    make_model("llama").save_pretrained(place)
    make_tokenizer().save_pretrained(place)
    fields = {"models": str(place), "layers": 1, "text": text(), "evaluations": {"core": {"contexts": 4}}}
    fields |= {"methods": ["batchtopk", "sampled:score=l2,l=2"], "d_sae": 48, "k": 4, "saes_per_job": 1}
    sizes = {"steps": 8, "batch_size": 32, "heldout_tokens": 64, "log_every": 3, "checkpoint_every": 4}
    sizes |= {"source": {"context": 16, "buffer_tokens": 800}, "cache": {"shard_tokens": 200}}
    return SweepConfig.from_dict(completed(fields | sizes))


def sweep(out: Path) -> None:
    """Three jobs on this machine, one after the other; failed ones are run again."""
    with forked() as codes:
        seen = launch(spec(), out, device="cpu", workers=1, retry_failed=True)
    if BUG in codes:
        raise AssertionError("".join(path.read_text() for path in out.glob("jobs/*/log.txt")) or "a traceback")
    if unfinished := [each for each in seen if each.status != "finished"]:
        raise UserError(" and ".join(f"{each.status}: {each.error}" for each in unfinished))


JOBS: dict[str, Callable[[Path], None]] = {  # the longest first, for the sake of processes that run them side by side
    "sweep": sweep,
    "eval": evaluate,
    "browse": browse,
    "train": train,
    "cache": write,
    "parts": write_parts,
}


def contents(out: Path) -> dict[str, Any]:
    """All files of a finished job, without what differs from run to run."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name not in LOGS:
            name = str(path.relative_to(out))
            content = path.read_bytes().replace(str(out).encode(), b"OUT")
            if path.suffix == ".json":
                found[name] = _lasting(json.loads(content))
            elif path.suffix == ".jsonl":
                found[name] = [_lasting(json.loads(line)) for line in content.splitlines()]
            else:
                found[name] = content
    return found


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lasting(item) for name, item in value.items() if name not in VOLATILE}
    return [_lasting(item) for item in value] if isinstance(value, list) else value
