"""Undamaged files of every kind, and what reads each of them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import zstandard
from safetensors.torch import save_file

import sampled_sae as ss
from sampled_sae.cli.train import Train
from sampled_sae.config import write_file
from sampled_sae.data.cache import open_cache, write_cache
from sampled_sae.data.source import open_source
from sampled_sae.data.text import TextSource
from sampled_sae.evals.autointerp.chat import AnswerCache, ChatConfig
from sampled_sae.evals.probing.data import load_file as load_labelled
from sampled_sae.evals.results import (
    load_live,
    read_density,
    read_explanations,
    read_result,
    read_unique,
    save_explanations,
    save_firing,
    write_result,
)
from sampled_sae.evals.similarity.members import open_members
from sampled_sae.experiments.stages import Record, Stage
from sampled_sae.experiments.synthetic import merge
from sampled_sae.method import presets
from sampled_sae.reporting.collect import collect
from sampled_sae.reporting.synthetic import load_results, print_results, write_page
from sampled_sae.reporting.write import write_report
from sampled_sae.sweeps.jobs import jobs_of
from sampled_sae.sweeps.slurm import RECORD as SLURM
from sampled_sae.sweeps.slurm import read_ids
from sampled_sae.sweeps.spec import read_spec
from sampled_sae.sweeps.store import Sweep
from sampled_sae.training import checkpoint
from sampled_sae.training.callbacks import read_log
from sampled_sae.training.resume import read_record
from sampled_sae.training.run import Callback, TrainConfig
from sampled_sae.training.trainer import checked
from tests.fuzz.formats import FILES, build_formats, damage_of, folder_of, read
from tests.fuzz.mutate import (
    Damage,
    binary_damage,
    json_damage,
    lines_damage,
    odd_arrays,
    other_archive,
    text_damage,
    unsealed_damage,
)
from tests.reporting import made_up, made_up_compare, made_up_sweep

D_IN, D_SAE, STEPS, BATCH = 16, 48, 12, 32
Make = Callable[[bytes, Any], Damage]


@dataclass(frozen=True)
class File:
    """A file that is damaged."""

    name: str
    """Relative to the target's folder."""
    damage: Make
    policy: Literal["sealed", "strict", "lenient"] = "strict"
    """What may be read from a damaged file without an error: what the undamaged file gives ("sealed"); that, or
    another valid setting ("strict", decided by the kind of damage); anything ("lenient": free text, and files whose
    bytes no checksum protects)."""
    free: frozenset[str] = frozenset()
    """Outermost JSON fields of a "strict" file that may be of any type or missing; * for all."""


@dataclass(frozen=True)
class Target:
    """A reader and the files that it reads."""

    name: str
    folder: str
    files: tuple[File, ...]
    read: Callable[[Path], Any]
    """Takes the folder; returns what was read."""
    weight: float = 1.0
    """Share of the inputs; less for slow readers."""
    copies: bool = False
    """Whether the reader writes into the folder."""
    notes: Callable[[Any], Iterable[str]] = field(default=lambda result: ())
    """Lines in a result that report what was left out."""


def digest(value: Any) -> Any:
    """What two equal results have in common, small enough to keep."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().contiguous().view(torch.uint8) if value.dim() else value.reshape(1)
        return str(value.dtype), tuple(value.shape), hashlib.sha1(whole.numpy().tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return {str(name): digest(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [digest(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


# ---- undamaged files --------------------------------------------------------------------------------


def rows(count: int = 400) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    fires = torch.rand(count, 32, generator=generator) < 0.1
    return (fires * torch.rand(count, 32, generator=generator)) @ torch.randn(32, D_IN, generator=generator)


CONFIGS = [ss.batchtopk(D_SAE, 4), ss.sampled(D_SAE, 4, "l2", 2, seed=1)]
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "heldout_tokens": 64, "device": "cpu"}
SETTINGS |= {"progress": False, "log_every": 2, "checkpoint_every": 4}


class Stop(Callback):
    """Stops a run after some steps, as Ctrl-C does."""

    def on_step(self, run: Any, learner: Any, step: int, stats: Any) -> None:
        if step == 9 and learner is run.learners[-1]:
            raise KeyboardInterrupt


def build(root: Path) -> None:
    """Write all undamaged files into an empty folder."""
    ss.train(rows(), CONFIGS, out=root / "run", **SETTINGS)
    with contextlib.suppress(KeyboardInterrupt, ss.UserError):
        ss.train(rows(), CONFIGS, out=root / "stopped", callbacks=[Stop()], **SETTINGS)
    (newest,) = sorted((root / "stopped" / "checkpoints").glob("step-*"))[-1:]
    shutil.copytree(newest, root / "checkpoint" / newest.name)
    saes = sorted((root / "run" / "saes").iterdir())
    shutil.copytree(saes[0], root / "sae")
    shutil.copytree(saes[0], root / "foreign")
    (root / "foreign" / "sampled_sae.json").unlink()
    _comparison(root / "compare", saes)  # before there are explanations, which take an embedder to compare
    shutil.copytree(root / "run" / "saes", root / "pair")
    for folder in (root / "pair").iterdir():
        save_firing(folder, torch.arange(D_SAE), 1000)
    data = rows().to(torch.bfloat16)
    write_cache(root / "cache", lambda start: iter([data[start:]]), 300, {"origin": "made up"}, shard_tokens=100)
    for number, folder in enumerate([root / "sae", *saes]):
        config = CONFIGS[0].to_dict()
        for name, make in made_up_sweep.ALL.items():
            write_result(folder, name, {"result": make(), "sae": config, "asked": {"contexts": 8}})
        known = {n: {"explanation": f"words {number} {n}", "score": n / 10} for n in range(5)}
        save_explanations(folder, known, explainer="made up")
        save_firing(folder, torch.arange(D_SAE), 1000)
    made_up_sweep.write_sweep(root / "sweep", scores=("l2",), ls=(2,), seeds=(0,))
    results = made_up.results(made_up.sae("BatchTopK"), made_up.sae("l2 l=5", l=5.0))
    results["data"]["config"], results["train"] = {"seed": 0}, {"steps": 5}
    for name in ("one", "two"):
        (root / "synthetic" / name).mkdir(parents=True)
        other = results if name == "one" else results | {"saes": [made_up.sae("TopK", 1)]}
        (root / "synthetic" / name / "results.json").write_text(json.dumps(other))
        shutil.copy(root / "run" / "log.jsonl", root / "synthetic" / name)
    record = Record(root, "tiny")
    record.path = root / "reproduce" / "reproduce.json"
    record.path.parent.mkdir()
    record.begin(STAGE)
    record.end(STAGE, 1.0, True)
    (root / "configs").mkdir()
    write_file(root / "configs" / "configs.json", "configs", {"saes": [config.to_dict() for config in CONFIGS]})
    spec = {"activations": ["a.npy"], "methods": ["batchtopk", "sampled:l=2"], "k": [2, 4], "d_sae": D_SAE, "steps": 5}
    (root / "jobs").mkdir()
    (root / "jobs" / "spec.json").write_text(json.dumps({**spec, "evaluations": {}, "slurm": {"partition": "gpu"}}))
    swept = Sweep.start(root / "jobs", read_spec(root / "jobs" / "spec.json"))
    write_file(swept.folder / SLURM, "sweep_slurm", {"ids": {"a": "7_0"}})
    answers = AnswerCache(ChatConfig(cache=str(root / "answers")))
    for n in range(3):
        answers.keep({"model": "m", "n": n}, f"answer {n}")
    build_formats(root)
    _texts(root / "text")
    _arrays(root / "arrays")


STAGE = Stage("train", {"d_sae": 8}, lambda: None, ())


def _comparison(folder: Path, saes: list[Path]) -> None:
    content = ss.compare(saes, device="cpu").to_dict()
    names = [sae["name"] for sae in content["saes"]]
    content["pairs"][0]["unique"] = [made_up_compare.unique(*names), made_up_compare.unique(*names[::-1])]
    folder.mkdir()
    write_file(folder / "compare.json", "comparison", content)


def _texts(folder: Path) -> None:
    folder.mkdir()
    table = [{"text": f"Document {n} says é and \u4e2d.", "label": "ab"[n % 2], "split": "train"} for n in range(12)]
    lines = "".join(json.dumps(row) + "\n" for row in table).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    (folder / "a.txt").write_text("Some text.\nMore é.\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / "a.parquet")
    (folder / "a.csv").write_text('text,label\n"one, two",a\n"two ""x""",b\nthree,a\n', encoding="utf-8")


def _arrays(folder: Path) -> None:
    folder.mkdir()
    data = rows(100)
    np.save(folder / "a.npy", data.numpy())
    np.savez(folder / "a.npz", data.numpy())
    torch.save({"a": data}, folder / "a.pt")
    save_file({"a": data}, folder / "a.safetensors")


# ---- readers ----------------------------------------------------------------------------------------


def _sae(folder: Path) -> Any:
    sae = ss.SAE.load(folder)
    return sae.cfg, sae.state_dict(), sae.encode(rows(4))


def _resume(folder: Path) -> Any:
    saes = ss.train(rows(), CONFIGS, out=folder, resume=True, **SETTINGS)
    return [sae.state_dict() for sae in saes]


def _checkpoint(folder: Path) -> Any:
    [path] = folder.iterdir()
    return checkpoint.load(path)._asdict()


def _cache(folder: Path) -> Any:
    cached = open_cache(folder)
    return cached.take(torch.arange(len(cached)))


def _results(folder: Path) -> Any:
    found = [read_result(folder, name) for name in made_up_sweep.ALL]
    if None in found:
        raise ss.UserError("not a result: the evaluation is repeated")
    return found, load_live(folder, D_SAE).mask


def _training(folder: Path) -> Any:
    return read_record(folder).to_dict()


def _explanations(folder: Path) -> Any:
    return read_explanations(folder, D_SAE)


def _firing(folder: Path) -> Any:
    found = read_density(folder, D_SAE)
    return found and (found.fired, found.tokens), load_live(folder, D_SAE).mask


def _compare(folder: Path) -> Any:
    members = open_members([folder])
    found = ss.compare([folder], device="cpu").to_dict()
    return [member.configuration for member in members], found


def _unique(folder: Path) -> Any:
    sae = next((folder.parent / "run" / "saes").iterdir())
    return read_unique(folder, sae, D_SAE)


def _report(folder: Path) -> Any:
    """The whole report; `notes` in front."""
    found = collect([folder])
    written = write_report([folder], folder / "report", figures=False)
    kept = {path.name: path.read_text() for path in written.tables}
    return [*found.notes, *written.notes, *(run.log_note for run in found.runs)], kept


def _collect(folder: Path) -> Any:
    found = collect([folder])
    known = [(sae.name, sae.config, sae.metadata, sae.width, sae.latents, sae.results) for sae in found.saes]
    return [*found.notes, *(run.log_note for run in found.runs)], known, [run.log for run in found.runs]


def _synthetic(folder: Path) -> Any:
    results = load_results(folder / "results.json")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_results(results)
    return printed.getvalue()


def _synthetic_page(folder: Path) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        merged = merge([folder / "one", folder / "two"], folder / "out")
        write_page(folder / "out")
        print_results(merged)
    return printed.getvalue()


def _record(folder: Path) -> Any:
    record = Record(folder, "tiny")
    record.check(STAGE)
    done = record.is_done(STAGE)
    record.begin(STAGE)
    record.end(STAGE, 1.0, True)
    return done


def _configs(folder: Path) -> Any:
    configs = Train(folder, configs=folder / "configs.json").sae_configs()
    return [config.to_dict() for config in checked(configs, TrainConfig(10, BATCH))]


def _spec(folder: Path) -> Any:
    return [job.to_dict() for job in jobs_of(read_spec(folder / "spec.json"))]


def _jobs(folder: Path) -> Any:
    swept = Sweep(folder)
    jobs = [(entry.job.to_dict(), entry.state.to_dict()) for entry in map(swept.entry, swept.names)]
    return swept.spec.to_dict(), jobs, read_ids(swept)


def _text(name: str) -> Callable[[Path], Any]:
    return lambda folder: list(TextSource(str(folder / name)).documents())


def _labelled(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        found = load_labelled(str(folder / name), 100)
        return found.texts, found.labels, found.splits

    return read


def _array(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        source = open_source(folder / name)
        [stream] = source.open(8, 16, 0).values()
        try:
            return stream.heldout, [stream.batch(n) for n in range(9)], dict(stream.identity) | {"modified": None}
        finally:
            stream.close()

    return read


def _log(folder: Path) -> Any:
    return read_log(folder / "log.jsonl")


def _answers(folder: Path) -> Any:
    found = AnswerCache(ChatConfig(cache=str(folder)))
    return [found.find({"model": "m", "n": n}) for n in range(3)]


def array_damage(content: bytes, draw: Any) -> Damage:
    if draw.random() < 0.3:
        new, where = odd_arrays(draw)
        return Damage(new, "bytes", where)
    if draw.random() < 0.1:
        return Damage(other_archive(draw), "bytes", "another archive")
    return binary_damage(content, draw)


def text_or_bytes(content: bytes, draw: Any) -> Damage:
    return draw.choice([text_damage, binary_damage])(content, draw)


ANY = frozenset("*")
OWN, CFG, WEIGHTS = "sampled_sae.json", "cfg.json", "sae_weights.safetensors"
RESULTS = tuple(File(f"evals/{name}.json", unsealed_damage, "strict", ANY) for name in made_up_sweep.ALL)
NAMES = [str(config.name) for config in presets.named(CONFIGS, 0)]


def targets() -> list[Target]:
    """All of them."""

    def sealed(*names: str) -> tuple[File, ...]:
        return tuple(File(name, json_damage if name.endswith(".json") else binary_damage, "sealed") for name in names)

    first = f"saes/{NAMES[0]}"
    swept = f"saes/{made_up_sweep.grid(('l2',), (2,), (0,))[0].name}"
    found = [
        Target("sae", "sae", sealed(CFG, OWN, WEIGHTS), _sae, 3),
        Target(
            "foreign sae",
            "foreign",
            (
                File(CFG, json_damage, "strict", frozenset({"metadata", "apply_b_dec_to_input", "architecture", "k"})),
                File(WEIGHTS, binary_damage, "lenient"),
            ),
            _sae,
        ),
        Target("checkpoint", "checkpoint", sealed(*(f"step-000000008/{n}" for n in CHECKPOINT)), _checkpoint, 3),
        Target(
            "resume",
            "stopped",
            (
                *sealed(*(f"checkpoints/step-000000008/{name}" for name in CHECKPOINT)),
                File("run.json", json_damage, "sealed"),
                File("log.jsonl", lines_damage, "sealed"),
            ),
            _resume,
            0.15,
            copies=True,
        ),
        Target(
            "finished run",
            "run",
            (
                File("run.json", json_damage, "sealed"),
                *sealed(f"{first}/{WEIGHTS}", f"{first}/{OWN}"),
            ),
            _resume,
            0.3,
            copies=True,
        ),
        Target("cache", "cache", sealed("cache.json", "shard-00000.safetensors", "shard-00002.safetensors"), _cache, 3),
        Target("results", "sae", RESULTS, _results, 2),
        Target(
            "explanations", "sae", (File("evals/explanations.json", unsealed_damage, "strict", ANY),), _explanations, 2
        ),
        Target("sealed results", "sae", sealed(*(file.name for file in RESULTS)), _results),
        Target("sealed explanations", "sae", sealed("evals/explanations.json"), _explanations),
        Target("sealed comparison", "compare", sealed("compare.json"), _unique),
        Target("record of a training", "run", sealed("train.json"), _training),
        Target("firing counts", "sae", (File("evals/firing.safetensors", binary_damage, "lenient"),), _firing),
        Target(
            "compare",
            "pair",
            (
                *sealed(*(f"{NAMES[0]}/{name}" for name in (WEIGHTS, CFG, OWN))),
                File(f"{NAMES[0]}/evals/firing.safetensors", binary_damage, "lenient"),
            ),
            _compare,
            0.5,
        ),
        Target("unique latents", "compare", (File("compare.json", unsealed_damage, "strict", ANY),), _unique, 2),
        Target(
            "collect",
            "sweep",
            (
                *(File(f"{swept}/{name}", unsealed_damage, "strict", ANY) for name in (CFG, OWN)),
                *(File(f"{swept}/{file.name}", unsealed_damage, "strict", ANY) for file in RESULTS),
                File("run.json", unsealed_damage, "strict", ANY),
                File("log.jsonl", lines_damage, "lenient"),
            ),
            _collect,
            2,
            notes=lambda result: result[0],
        ),
        Target(
            "report",
            "sweep",
            (
                *(File(f"{swept}/{name}", unsealed_damage, "strict", ANY) for name in (CFG, OWN)),
                *(File(f"{swept}/{file.name}", unsealed_damage, "strict", ANY) for file in RESULTS),
                File("run.json", unsealed_damage, "strict", ANY),
                File("log.jsonl", lines_damage, "lenient"),
            ),
            _report,
            0.15,
            copies=True,
            notes=lambda result: result[0],
        ),
        Target(
            "report of a comparison",
            "compare",
            (File("compare.json", unsealed_damage, "strict", ANY),),
            _report,
            0.15,
            copies=True,
            notes=lambda result: result[0],
        ),
        Target("synthetic", "synthetic/one", (File("results.json", unsealed_damage, "strict", ANY),), _synthetic, 1),
        Target(
            "merge",
            "synthetic",
            (
                File("one/results.json", unsealed_damage, "strict", ANY),
                File("two/log.jsonl", lines_damage, "lenient"),
            ),
            _synthetic_page,
            0.15,
            copies=True,
        ),
        Target(
            "record of stages", "reproduce", (File("reproduce.json", unsealed_damage, "strict", ANY),), _record, 1, True
        ),
        Target("configs", "configs", (File("configs.json", unsealed_damage, "strict", ANY),), _configs, 3),
        Target("spec of a sweep", "jobs", (File("spec.json", unsealed_damage, "strict", ANY),), _spec),
        Target(
            "jobs of a sweep",
            "jobs",
            tuple(File(name, unsealed_damage, "strict", ANY) for name in ("sweep.json", "jobs/a/job.json", SLURM)),
            _jobs,
        ),
        Target("log", "run", (File("log.jsonl", lines_damage, "lenient"),), _log),
        Target("answers", "answers", (File("answers.jsonl", lines_damage, "lenient"),), _answers),
    ]
    found += [
        Target(name, folder_of(name), tuple(File(file, damage_of(file), "lenient") for file in files), read)
        for name, files in FILES.items()
    ]
    kinds: dict[str, tuple[Make, Any]] = {
        "a.jsonl": (lines_damage, "lenient"),
        "a.txt": (text_or_bytes, "lenient"),
        "a.jsonl.gz": (binary_damage, "lenient"),
        "a.jsonl.zst": (binary_damage, "lenient"),
        "a.parquet": (binary_damage, "lenient"),
    }
    found += [Target(f"text {name}", "text", (File(name, *how),), _text(name)) for name, how in kinds.items()]
    kinds["a.csv"] = (text_or_bytes, "lenient")
    found += [
        Target(f"labelled {name}", "text", (File(name, *kinds[name]),), _labelled(name))
        for name in ("a.jsonl", "a.csv", "a.parquet")
    ]
    found += [
        Target(f"activations {name}", "arrays", (File(name, array_damage, "lenient"),), _array(name))
        for name in ("a.npy", "a.pt", "a.safetensors", "a.npz")
    ]
    return found


CHECKPOINT = ("checkpoint.json", "0.safetensors", "1.safetensors")
